"""Kernels that the host launches at every step, without what Triton works out each time.

A launch through a jit function specializes every argument, makes a key of the result and
of the options, and compares each global that the kernel was compiled with. For the same
tensors as in the launch before all of that ends at the same compiled kernel.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor

_ALIGNED: Final = 16
"""Bytes; Triton compiles a kernel of its own for pointers that are not."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launch that was made.

    Attributes:
        compiled: the kernel, launched with all of `args`.
        args: in the kernel's order, constants included; None for `first` and whatever
            may vary.
        first: the first of the fixed tensors, and where it is in `args`.
        rest: the other fixed tensors.
        kind: of what may vary.
    """

    compiled: Any
    args: list[Any]
    first: weakref.ref[Tensor]
    first_place: int
    rest: tuple[Tensor, ...]
    kind: list[object]


class Relaunch:
    """A kernel and its last launch, which can be made again with a few values changed.

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
        self._launched: _Launched | None = None

    def again(
        self, grid: int, fixed: tuple[Tensor, ...], varying: tuple[Tensor | int, ...]
    ) -> bool:
        """Launch as before, if everything but the values of `varying` is as it was.

        Args:
            grid: instances.
            fixed: the tensors of the last launch that do not vary.
            varying: values for the parameters that do, in their order.

        Returns:
            Whether it was launched.
        """
        last = self._launched
        if (
            last is None
            or last.first() is not fixed[0]
            or not all(map(is_, last.rest, fixed[1:]))
            or last.kind != _kind(varying)
        ):
            return False
        args = last.args.copy()
        args[last.first_place] = fixed[0]
        for place, value in zip(self._places, varying, strict=True):
            args[place] = value
        last.compiled[grid, 1, 1](*args)
        return True

    def launch(
        self,
        grid: int,
        fixed: tuple[Tensor, ...],
        varying: tuple[Tensor | int, ...],
        *args: Any,
        **options: Any,
    ) -> None:
        """Launch through the jit function, and keep what `again` needs.

        Args:
            grid: instances.
            fixed, varying: as in `again`; the first fixed one is an argument by itself.
            args, options: all arguments of the kernel, constants by name, and Triton's
                options.
        """
        compiled = self._kernel[(grid,)](*args, **options)
        # The interpreter has none. ROCm's pointers are specialized by more than `_kind`.
        if compiled is None or torch.version.hip or not _plain(varying):
            self._launched = None
            return
        names = self._kernel.arg_names
        self._places = [names.index(name) for name in self._varying]
        whole = [*args, *(options[name] for name in names[len(args) :])]
        first = next(n for n, value in enumerate(whole) if value is fixed[0])
        for place in (first, *self._places):
            whole[place] = None
        kind = _kind(varying)
        here = weakref.ref(fixed[0], self._forget)
        self._launched = _Launched(compiled, whole, here, first, fixed[1:], kind)

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._launched is not None and self._launched.first is gone:
            self._launched = None


def _plain(varying: tuple[Tensor | int, ...]) -> bool:
    """Whether no more than `_kind` says need be looked at before a kernel reads them."""
    return all(v.stride(-1) == 1 for v in varying if isinstance(v, Tensor))


def _kind(varying: tuple[Tensor | int, ...]) -> list[object]:
    """Equal for values that the same compiled kernel takes, laid out in the same way."""
    return [
        -(2**31) <= value < 2**31
        if isinstance(value, int)
        else (value.dtype, value.stride(), value.data_ptr() % _ALIGNED == 0)
        for value in varying
    ]
