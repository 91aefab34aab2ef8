"""The shortest way to launch a compiled kernel again, on an engine's own thread.

A launcher of Triton's is a Python function around one of C, which takes every constant as
well, and lets go of the interpreter while the driver is called. torch has a launcher of
its own for the kernels that Inductor makes: it takes the kernel's parameters alone and
keeps the interpreter, so that no other thread of an engine gets in between. By that one, a
launch of ours costs the host what one of Inductor's does.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

Start = Callable[[int, int, list[Any]], None]
"""Launches `grid` instances on a stream, with arguments."""


class Direct(NamedTuple):
    """A way to launch.

    Attributes:
        start: the launch.
        args: what it takes, in a list that each launch copies.
        places: of those that change, in `args`.
    """

    start: Start
    args: list[Any]
    places: tuple[int, ...]


def direct(compiled: Any, args: Sequence[Any], places: Sequence[int]) -> Direct:
    """The shortest way that is known for a kernel; as Triton does it for one that is not.

    Args:
        compiled: what a launch through the jit function gave.
        args: all its arguments, constants included; tensors as addresses.
        places: of those that change from one launch to the next.
    """
    launcher = compiled.run
    version = _version_of(launcher)
    if version is None:
        return Direct(_by_launcher(compiled), list(args), tuple(places))
    found = _by_torch(compiled, args, places)
    if found is not None:
        return found
    start = _flat(compiled) if version == "3.6" else _packed(compiled)
    return Direct(start, list(args), tuple(places))


def _by_launcher(compiled: Any) -> Start:
    launcher, function = compiled.run, compiled.function
    metadata = compiled.packed_metadata

    def start(grid: int, stream: int, args: list[Any]) -> None:
        launcher(grid, 1, 1, stream, function, metadata, None, None, None, *args)

    return start


def _flat(compiled: Any) -> Start:
    launcher, function = compiled.run, compiled.function
    launch = launcher.launch
    how = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    before = (*how, None, None, compiled.packed_metadata, None, None, None)

    def flat(grid: int, stream: int, args: list[Any]) -> None:
        launch(grid, 1, 1, stream, function, *before, *args)

    return flat


def _packed(compiled: Any) -> Start:
    launcher, function = compiled.run, compiled.function
    launch = launcher.launch
    how = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    kinds = (launcher.arg_annotations, launcher.kernel_signature)
    metadata = compiled.packed_metadata
    whole = (*how, metadata, None, None, None, None, None, *kinds)

    def packed(grid: int, stream: int, args: list[Any]) -> None:
        launch(grid, 1, 1, stream, function, *whole, args)

    return packed


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
    values = [value for _, value, _ in parameters] + [None] * _SCRATCH
    types = "".join(filter(None, letters)) + _ADDRESS * _SCRATCH
    # What was None is compiled in and None again: it goes where None belongs.
    where |= dict.fromkeys(absent, len(parameters))
    function, warps, shared = compiled.function, metadata.num_warps, metadata.shared

    def start(grid: int, stream: int, args: list[Any]) -> None:
        launch(function, grid, 1, 1, warps, shared, types, tuple(args), stream)

    return Direct(start, values, tuple(where[(place,)] for place in places))


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
