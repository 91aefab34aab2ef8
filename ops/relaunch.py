"""Kernels that are launched at every step, without what Triton works out each time.

A launch through a jit function specializes every argument, makes a key of the result and
of the options, and compares each global that the kernel was compiled with. For the same
tables, and values laid out as before, all of that ends at the same compiled kernel.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice.ops import background

_ALIGNED: Final = 16
"""Bytes; Triton compiles a kernel of its own for pointers that are not."""

_MOST: Final = 64
"""Launches kept of one site. More than a few mean that something always differs."""

Varying = tuple[Tensor | int | None, ...]


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a kernel is launched: at the boundary of a table, or for an engine's steps.

    Attributes:
        first: the first of the fixed tensors.
        rest: the other fixed tensors.
        launches: the compiled kernel and all its arguments, constants included, by what
            they depend on. Fixed tensors are addresses there; what varies is None.
    """

    first: weakref.ref[Tensor]
    rest: tuple[Tensor, ...]
    launches: dict[Hashable, tuple[Any, list[Any]]] = field(default_factory=dict)

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
        self._places: list[int] = []
        self._sites: dict[int, _Site] = {}

    def again(
        self,
        grid: int,
        fixed: tuple[Tensor, ...],
        varying: Varying,
        how: Hashable = None,
    ) -> bool:
        """Launch as before, if everything but the values of `varying` is as it was.

        Args:
            grid: instances.
            fixed: the tensors of an earlier launch that do not vary.
            varying: values for the parameters that do, in their order.
            how: all else that decides constants, options and other arguments.

        Returns:
            Whether it was launched.
        """
        site = self._sites.get(id(fixed[0]))
        if site is None or not site.has(fixed):
            return False
        kind, values = _seen(varying)
        kept = site.launches.get((kind, how))
        if kept is None:
            return False
        compiled, args = kept
        args = args.copy()
        for place, value in zip(self._places, values, strict=True):
            args[place] = value
        compiled[grid, 1, 1](*args)
        return True

    def launch(
        self,
        grid: int,
        fixed: tuple[Tensor, ...],
        varying: Varying,
        *args: Any,
        how: Hashable = None,
        ahead: bool = False,
        **options: Any,
    ) -> None:
        """Launch through the jit function, and keep what `again` needs.

        Args:
            grid: instances.
            fixed, varying, how: as in `again`.
            args, options: all arguments of the kernel, constants by name, and Triton's
                options.
            ahead: have it compiled in the background instead.
        """
        if ahead:
            compile_it = partial(self._compile, args, options)
            background.submit(self._form(args, options), compile_it)
            return
        if background.any_job():
            background.settle(self._form(args, options))
        compiled = self._kernel[(grid,)](*args, **options)
        # The interpreter has none. ROCm's pointers are specialized by more than `_seen`.
        if compiled is None or torch.version.hip or not _plain(varying):
            return
        names = self._kernel.arg_names
        self._places = [names.index(name) for name in self._varying]
        whole = [_address(value) for value in args]
        whole += [options[name] for name in names[len(args) :]]
        for place in self._places:
            whole[place] = None
        site = self._site(fixed)
        if len(site.launches) >= _MOST:
            site.launches.clear()
        site.launches[_seen(varying)[0], how] = compiled, whole

    def _form(self, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
        """What Triton compiles a kernel of its own for, or finer."""
        kinds = [
            None if isinstance(value, int) and name in self._varying else _form(value)
            for name, value in zip(self._kernel.arg_names, args, strict=False)
        ]
        return id(self), tuple(kinds), tuple(options.items())

    def _compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Leave the kernel in Triton's memory, and what launches it in its cache."""
        from triton.runtime import driver

        compiled = self._kernel.warmup(*args, grid=(1,), **options)
        driver.active.launcher_cls(compiled.src, compiled.metadata)

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


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % _ALIGNED == 0
    return tuple(map(_form, value)) if isinstance(value, tuple) else value


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
            kind.append((value.dtype, value.stride(), address % _ALIGNED == 0))
            values.append(address)
        else:
            kind.append(None if value is None else -(2**31) <= value < 2**31)
            values.append(value)
    return tuple(kind), values
