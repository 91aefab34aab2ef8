"""The shortest way to launch a compiled kernel again, on an engine's own thread.

A launcher of Triton's is a Python function around one of C, which takes every constant as
well, and lets go of the interpreter while the driver is called. torch has a launcher of
its own for the kernels that Inductor makes: it takes the kernel's parameters alone and
keeps the interpreter, so that no other thread of an engine gets in between. Where there is
that one, kernels of ours are launched as Inductor's are.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import torch

Values = Sequence[int | None]
"""What changes from one launch to the next, in the order of its places."""

Direct = Callable[[int, int, Values], None]
"""Launches `grid` instances on a stream, with values."""


def direct(compiled: Any, args: Sequence[Any], places: Sequence[int]) -> Direct:
    """The shortest way that is known for a kernel; as Triton does it for one that is not.

    Args:
        compiled: what a launch through the jit function gave.
        args: all its arguments, constants included; tensors as addresses.
        places: of those that change from one launch to the next.
    """
    version = _version_of(compiled.run)
    found = None if version is None else _by_torch(compiled, args, places)
    return found or _by_triton(compiled, version, args, places)


def placed(args: Sequence[Any], places: Sequence[int], values: Values) -> list[Any]:
    """The arguments with values at their places."""
    found = list(args)
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found


def _by_triton(
    compiled: Any, version: str | None, args: Sequence[Any], places: Sequence[int]
) -> Direct:
    """By the function of C in a known launcher, else by the launcher as it is."""
    launch, function = compiled.run, compiled.function
    before: tuple[Any, ...] = (compiled.packed_metadata, None, None, None)
    if version is not None:
        launcher, launch = launch, launch.launch
        how = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        if version == "3.6":
            before = (*how, None, None, *before)
        else:
            kinds = (launcher.arg_annotations, launcher.kernel_signature)
            before = (*how, *before, None, None, *kinds)
    packed = version == "3.9"

    def start(grid: int, stream: int, values: Values) -> None:
        whole = placed(args, places, values)
        rest = (whole,) if packed else whole
        launch(grid, 1, 1, stream, function, *before, *rest)

    return start


_GIVEN: Final = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_HOOKS: Final = (
    "kernel_metadata",
    "launch_metadata",
    "launch_enter_hook",
    "launch_exit_hook",
)
_LAUNCHERS: Final = {
    (*_GIVEN, "args"): "3.6",
    (*_GIVEN, *_HOOKS, "args"): "3.9",
}
"""The Triton whose launcher takes these parameters."""


def _version_of(launcher: Any) -> str | None:
    """Which known launcher of a kernel without scratch memory it is, None for another."""
    if type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    # It watches every launch.
    if getattr(launcher, "gsan_enabled", False):
        return None
    parameters = inspect.signature(type(launcher).__call__).parameters
    return _LAUNCHERS.get(tuple(parameters))


_LETTERS: Final = {"i32": "i", "i64": "l", "fp32": "f"}
"""Of the types that our kernels take besides addresses, as torch's launcher knows them."""

_ADDRESS: Final = "O"
_SCRATCH: Final = 2
"""Addresses behind the parameters, of memory that `_version_of` knows is not needed."""


def _by_torch(
    compiled: Any, args: Sequence[Any], places: Sequence[int]
) -> Direct | None:
    """By the launcher of Inductor's kernels; None where it cannot launch this one."""
    launch = getattr(
        getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None
    )
    launcher = compiled.run
    if launch is None or launcher.launch_cooperative_grid or launcher.launch_pdl:
        return None
    metadata, source = compiled.metadata, compiled.src
    if metadata.num_ctas != 1:
        return None
    kinds = tuple(source.signature.values())
    parameters = list(_parameters(kinds, args, source.constants, ()))
    letters = [
        _ADDRESS if kind[0] == "*" else _LETTERS.get(kind) for kind, *_ in parameters
    ]
    where = {path: number for number, (_, _, path) in enumerate(parameters)}
    absent = [(place,) for place in places if (place,) not in where]
    if None in letters or any(source.constants.get(at, 0) is not None for at in absent):
        return None
    fixed = [value for _, value, _ in parameters] + [None] * _SCRATCH
    types = "".join(filter(None, letters)) + _ADDRESS * _SCRATCH
    function, warps, shared = compiled.function, metadata.num_warps, metadata.shared
    # What was None is compiled in and None again: it is no parameter.
    present = [n for n, place in enumerate(places) if (place,) in where]
    at = [where[(places[n],)] for n in present]
    if at == list(range(len(at))) and len(at) > 1:
        chosen, tail = itemgetter(*present), tuple(fixed[len(at) :])

        def in_front(grid: int, stream: int, values: Values) -> None:
            whole = (*chosen(values), *tail)
            launch(function, grid, 1, 1, warps, shared, types, whole, stream)

        return in_front

    def anywhere(grid: int, stream: int, values: Values) -> None:
        whole = tuple(placed(fixed, at, [values[n] for n in present]))
        launch(function, grid, 1, 1, warps, shared, types, whole, stream)

    return anywhere


def _parameters(
    kinds: Any, values: Any, constants: Any, path: tuple[int, ...]
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """(type, value, where it stands) of each argument that the compiled kernel takes."""
    for number, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        at = (*path, number)
        if isinstance(kind, tuple | list):
            yield from _parameters(kind, value, constants, at)
        elif kind != "constexpr" and at not in constants:
            yield kind, value, at
