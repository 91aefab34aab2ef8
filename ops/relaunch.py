"""Kernels that are launched at every step, without what Triton works out each time.

A launch through a jit function specializes every argument, makes a key of the result and
of the options, and compares each global that the kernel was compiled with; the compiled
kernel then asks for the device and the stream, and for hooks that nobody set. For the same
tables, and values laid out as before, all of that comes out the same.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice.ops import background
from eyesplice.ops.direct_launch import Values, direct, placed
from eyesplice.ops.site_tables import ALIGNED

_MOST: Final = 64
"""Launches kept of one site. More than a few mean that something always differs."""

Varying = tuple[Tensor | int | None, ...]


class KeptLaunch:
    """A compiled kernel with all its arguments, a few of which change at each launch."""

    __slots__ = (
        "_args",
        "_compiled",
        "_device",
        "_direct",
        "_places",
        "_runtime",
        "_stream_of",
    )

    def __init__(
        self, compiled: Any, args: Sequence[Any], places: Sequence[int]
    ) -> None:
        """Nothing is launched.

        Args:
            compiled: what a launch through the jit function gave.
            args: every argument, constants included; tensors as addresses.
            places: of those that change.
        """
        from triton import knobs
        from triton.runtime import driver

        self._runtime = knobs.runtime
        self._compiled = compiled
        self._args = list(args)
        self._places = tuple(places)
        self._stream_of = driver.active.get_current_stream
        self._device = driver.active.get_current_device()
        self._direct = direct(compiled, self._args, self._places)

    def __call__(self, grid: int, values: Values) -> None:
        """Launch `grid` instances with these values, on the current stream."""
        runtime = self._runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            # A profiler wants to know of every launch: it gets what Triton tells it.
            self._compiled[grid, 1, 1](*placed(self._args, self._places, values))
            return
        self._direct(grid, self._stream_of(self._device), values)


Keeps = Callable[[KeptLaunch], None]
"""Takes a launch that was made, to be made again."""


def launch(
    kernel: Any,
    grid: int,
    args: Sequence[Any],
    options: dict[str, Any],
    *,
    varying: Sequence[str],
    keeps: Keeps | None = None,
    ahead: bool = False,
) -> None:
    """Launch through the jit function.

    Args:
        kernel: a jit function.
        grid: instances.
        args, options: all its arguments, constants by name, and Triton's options.
        varying: parameters that another launch may change: tensors, and integers that
            Triton does not specialize.
        keeps: gets the launch. The interpreter compiles nothing to keep, and ROCm
            specializes pointers by more than their alignment.
        ahead: have it compiled in the background instead.
    """
    if ahead:
        job = partial(_compile, kernel, args, options)
        background.submit(_form_of(kernel, args, options, varying), job)
        return
    if background.any_job():
        background.settle(_form_of(kernel, args, options, varying))
    compiled = kernel[(grid,)](*args, **options)
    if keeps is None or compiled is None or torch.version.hip:
        return
    names = kernel.arg_names
    whole = [_address(value) for value in args]
    whole += [options[name] for name in names[len(args) :]]
    places = [names.index(name) for name in varying]
    for place in places:
        whole[place] = None
    keeps(KeptLaunch(compiled, whole, places))


def _compile(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
    """Leave the kernel in Triton's memory, and what launches it in its cache."""
    from triton.runtime import driver

    compiled = kernel.warmup(*args, grid=(1,), **options)
    driver.active.launcher_cls(compiled.src, compiled.metadata)


def _form_of(
    kernel: Any, args: Sequence[Any], options: dict[str, Any], varying: Sequence[str]
) -> Hashable:
    """What Triton compiles a kernel of its own for, or finer."""
    kinds = [
        None if isinstance(value, int) and name in varying else _form(value)
        for name, value in zip(kernel.arg_names, args, strict=False)
    ]
    return id(kernel), tuple(kinds), tuple(options.items())


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNED == 0
    return tuple(map(_form, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a kernel is launched: for the steps of an engine.

    Attributes:
        first: the first of the fixed tensors.
        rest: the other fixed tensors.
        launches: kept, by what they depend on.
    """

    first: weakref.ref[Tensor]
    rest: tuple[Tensor, ...]
    launches: dict[Hashable, KeptLaunch] = field(default_factory=dict)

    def has(self, fixed: tuple[Tensor, ...]) -> bool:
        """Whether these are its tensors."""
        return self.first() is fixed[0] and all(map(is_, self.rest, fixed[1:]))


class Relaunch:
    """A kernel and its launches, which can be made again with a few values changed.

    Nothing is kept once the first of the fixed tensors has gone: an engine that ends in
    this process takes its tables with it.
    """

    def __init__(self, kernel: Any, varying: Sequence[str]) -> None:
        """No launch yet.

        Args:
            kernel: a jit function.
            varying: its parameters that another launch may change: tensors, and integers
                that Triton does not specialize.
        """
        self._kernel = kernel
        self._varying = varying
        self._sites: dict[int, _Site] = {}

    def again(self, grid: int, fixed: tuple[Tensor, ...], varying: Varying) -> bool:
        """Launch as before, if everything but the values of `varying` is as it was.

        Args:
            grid: instances.
            fixed: the tensors of an earlier launch that do not vary.
            varying: values for the parameters that do, in their order.

        Returns:
            Whether it was launched.
        """
        site = self._sites.get(id(fixed[0]))
        if site is None or not site.has(fixed):
            return False
        kind, values = _seen(varying)
        kept = site.launches.get(kind)
        if kept is None:
            return False
        kept(grid, values)
        return True

    def launch(
        self,
        grid: int,
        fixed: tuple[Tensor, ...],
        varying: Varying,
        *args: Any,
        **options: Any,
    ) -> None:
        """Launch through the jit function, and keep what `again` needs.

        Args:
            grid: instances.
            fixed, varying: as in `again`.
            args, options: all arguments of the kernel, constants by name, and Triton's
                options.
        """
        keeps = partial(self._keep, fixed, varying) if _plain(varying) else None
        launch(self._kernel, grid, args, options, varying=self._varying, keeps=keeps)

    def _keep(
        self, fixed: tuple[Tensor, ...], varying: Varying, kept: KeptLaunch
    ) -> None:
        site = self._site(fixed)
        if len(site.launches) >= _MOST:
            site.launches.clear()
        site.launches[_seen(varying)[0]] = kept

    def forget(self) -> None:
        """Keep no launch."""
        self._sites.clear()

    def _site(self, fixed: tuple[Tensor, ...]) -> _Site:
        """The site of the tensors, a new one if any of them is another than before."""
        key = id(fixed[0])
        site = self._sites.get(key)
        if site is None or not site.has(fixed):
            here = weakref.ref(fixed[0], partial(self._gone, key))
            site = self._sites[key] = _Site(here, fixed[1:])
        return site

    def _gone(self, key: int, first: weakref.ref[Tensor]) -> None:
        site = self._sites.get(key)
        if site is not None and site.first is first:
            del self._sites[key]


def _address(value: Any) -> Any:
    """Tensors as the addresses that a compiled kernel takes, in tuples as well."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return tuple(map(_address, value)) if isinstance(value, tuple) else value


def _plain(varying: Varying) -> bool:
    """Whether no more than `_seen` says need be looked at before a kernel reads them."""
    return all(v.stride(-1) == 1 for v in varying if isinstance(v, Tensor))


def _seen(varying: Varying) -> tuple[tuple[object, ...], list[int | None]]:
    """What the compiled kernel depends on, and the values as it takes them.

    The first is equal for values that the same compiled kernel takes, laid out alike.
    """
    kind: list[object] = []
    values: list[int | None] = []
    for value in varying:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            kind.append((value.dtype, value.stride(), address % ALIGNED == 0))
            values.append(address)
        else:
            kind.append(None if value is None else -(2**31) <= value < 2**31)
            values.append(value)
    return tuple(kind), values
