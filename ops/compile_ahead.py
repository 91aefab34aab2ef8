"""Has the kernels of a spliced graph compiled while the rest of it is.

The launches of a graph differ by the number of tokens, so that a capture of every size
meets a dozen forms of the boundary kernel, a second or more of compilation each. What is
compiled here is what the launching functions themselves would launch, given tensors that
lie like the graph's: nothing says a second time which forms there are.
"""

import inspect
import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from eyesplice.ops import background
from eyesplice.ops.site_tables import SiteTables

logger = logging.getLogger("vllm.eyesplice")

Call = tuple[str, tuple[Any, ...]]
"""An op of a graph by its name in `contracts.SCHEMAS`, and its arguments, tensors fake or
not."""

_ROWS: Final = frozenset({"stream", "branch", "pending", "value"})
"""Parameters with a row for each token of a step."""


class _Layout(NamedTuple):
    """How a tensor lies in memory; of `_ROWS`, without the number of rows."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def compile_ahead(calls: Iterable[Call], tables: SiteTables) -> None:
    """Begin to compile what the calls launch for steps of any number of tokens.

    Does nothing but for NVIDIA GPUs. The largest step comes first: it is what an engine
    runs first. No error leaves it: what is not compiled here is compiled at its launch.

    Args:
        calls: those of a graph that will run on the current device.
        tables: of one of its ops; those of the others lie like them.
    """
    try:
        calls = [call for call in calls if call[1][0].is_cuda]
        if not calls or torch.version.hip or _interpreted():
            return
        queue(calls, tables)
        background.start(torch.cuda.current_device())
    except Exception:
        logger.debug("nothing is compiled ahead", exc_info=True)


def queue(calls: Iterable[Call], tables: SiteTables) -> None:
    """Queue the jobs of `compile_ahead`."""
    from eyesplice.ops import launch

    jobs = []
    room = tables.token_map.numel()
    for name, arguments in dict.fromkeys(_described(calls, tables)):
        width = arguments[0][1].size[-1]
        for place, num_tokens in enumerate(_steps(width, room)):
            jobs.append((place, name, arguments, num_tokens))
    jobs.sort(key=lambda job: job[0])
    with unset_fake_temporarily():
        for _, name, arguments, num_tokens in jobs:
            whole = {key: _built(key, value, num_tokens) for key, value in arguments}
            getattr(launch, name)(**whole, ahead=True)


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _described(
    calls: Iterable[Call], tables: SiteTables
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What each call launches with, by name, tensors as layouts; odd ones are left out."""
    from eyesplice.ops import launch, launch_graph

    for name, arguments in calls:
        bound = inspect.signature(getattr(launch_graph, name)).bind(*arguments)
        beside = {
            key: getattr(tables, key)
            for key in inspect.signature(getattr(launch, name)).parameters
            if hasattr(tables, key)
        }
        whole = {**bound.arguments, **beside}
        items = [(key, _layout(key, value)) for key, value in whole.items()]
        if None not in [size for _, value in items for size in _sizes(value)]:
            yield name, tuple(items)


def _layout(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_layout(name, one) for one in value)
    if not isinstance(value, Tensor):
        return value
    size = value.shape[1:] if name in _ROWS else value.shape
    return _Layout(_known(size), _known(value.stride()), value.dtype)


def _known(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """The sizes, None for a symbol: to look at one could guard on it."""
    return tuple(size if isinstance(size, int) else None for size in sizes)


def _sizes(value: Any) -> Iterator[int | None]:
    if isinstance(value, _Layout):
        yield from value.size + value.stride
    elif isinstance(value, tuple):
        for one in value:
            yield from _sizes(one)


def _built(name: str, value: Any, num_tokens: int) -> Any:
    """A tensor that holds nothing; Triton takes its address, 0, for an aligned one."""
    if isinstance(value, _Layout):
        size = (num_tokens, *value.size) if name in _ROWS else value.size
        return torch.empty_strided(size, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_built(name, one, num_tokens) for one in value]
    return value


@lru_cache
def _steps(width: int, room: int) -> tuple[int, ...]:
    """Numbers of tokens, the largest first, that show every way to launch a boundary.

    A step of one token is by itself: the strides of its values say nothing.
    """
    from eyesplice.ops.launch import choose_launch

    kinds = {
        (choose_launch(width, tokens, room), tokens == 1): tokens
        for tokens in range(1, room + 1)
    }
    return tuple(sorted(kinds.values(), reverse=True))
