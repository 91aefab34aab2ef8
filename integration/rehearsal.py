"""Watches modules while a batch runs: who was called, in what order, with what tensors.

Every tensor is kept until the recording is dropped, so that an address belongs to one
value: two calls that name the same address passed the same tensor on.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module.

    Attributes:
        path: the module's path.
        start, stop: turns at which it began and ended; every begin and end is one.
        inputs, outputs: its matrices of numbers, `[rows, width]`, in order.
    """

    path: str
    start: int
    stop: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Recording:
    """The calls of one batch."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls: dict[str, list[Call]] = {}
        for call in calls:
            self._calls.setdefault(call.path, []).append(call)

    def only(self, path: str) -> Call | None:
        """The one call of a module, None if it was not called or more than once."""
        calls = self._calls.get(path, [])
        return calls[0] if len(calls) == 1 else None


def matrices(values: Any) -> tuple[Tensor, ...]:
    """The floating-point matrices among a module's arguments or results."""
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, tuple | list):
        values = (values,)
    return tuple(
        value
        for value in values
        if isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()
    )


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of modules inside the block.

    Args:
        modules: by path.
    """
    calls: list[Call] = []
    open_calls: list[tuple[int, tuple[Tensor, ...]]] = []
    turn = iter(range(2**62))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        open_calls.append((next(turn), (*matrices(args), *matrices(kwargs))))

    def leave(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            start, inputs = open_calls.pop()
            calls.append(Call(path, start, next(turn), inputs, matrices(output)))

        return hook

    with ExitStack() as stack:
        for path, module in modules.items():
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave(path)).remove)
        yield calls
