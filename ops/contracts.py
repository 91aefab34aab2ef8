"""Schemas, fakes and dispatch of the ops. Torch only: kernels load when first needed.

boundary_(stream!, branch?, weight, weight_offset, eps, program, ...) -> normed
    x = branch; h = stream + x; y = norm(h) * (weight + weight_offset)
    with the token's program run on x, on h and on y; `stream` becomes h
inline_(value!, stage, program, families) -> ()
    the program's entries of one stage, run on `value` in place
custom_gain(value, program) -> gain
    fp32 `[tokens]`: how strongly a user's own op acts on each token of `value`
anchor(tensors, layer) -> ()
    a mark that makes Dynamo lift `tensors` as graph inputs; the splice erases it
route_(token_map!, program, select!, ...) -> ()
    fills the per-token maps, one of each table and `select`; called by the host before a
    step, never in the graph
collect_(...) -> ()
    carries a step's scores and latches over to the next; called by the host after it

Of the tables, the ops of the graph take the program alone: `site_tables` says why, and
finds the others.

What a graph sees as written is only what it reads: the row op's value, and the maps of
`route_`. `select` and the `work` tensors are written too, but they are scratch that only
these ops look at, and their order is that of the values the ops share; declared written,
functionalization would chain them through every op of the graph, and copy them.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice.ops import reference, reference_graph

NAMESPACE: Final = "eyesplice"

_library = torch.library.Library(NAMESPACE, "DEF")

SCHEMAS: Final = {
    "boundary_": (
        "(Tensor(a!) stream, Tensor(b!)? branch, Tensor weight, float weight_offset, "
        "float eps, Tensor program, int families, Tensor? pending=None, "
        "bool defer=False) -> Tensor"
    ),
    "inline_": "(Tensor(a!) value, int stage, Tensor program, int families) -> ()",
    "custom_gain": "(Tensor value, Tensor program) -> Tensor",
    "anchor": "(Tensor[] tensors, int layer) -> ()",
    "route_": (
        "(Tensor(a!) token_map, Tensor program, Tensor(b!) select, Tensor[] work, "
        "Tensor per_request, Tensor query_start_loc, Tensor positions, "
        "Tensor token_ids_of_step, Tensor clauses, Tensor token_ids, "
        "Tensor token_sets, int num_requests, int extent, int capture_start, "
        "int capture_limit) -> ()"
    ),
    "collect_": (
        "(Tensor[] work, Tensor select, Tensor reads, Tensor per_request, "
        "Tensor query_start_loc, Tensor positions, int num_requests) -> ()"
    ),
}


def _boundary_fake(stream: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(stream, memory_format=torch.contiguous_format)


def _custom_gain_fake(value: Tensor, program: Tensor) -> Tensor:
    return value.new_empty((value.shape[0],), dtype=torch.float32)


def _nothing(*_: object) -> None:
    return None


def _anchor(tensors: Sequence[Tensor], layer: int) -> None:
    return None


_OF_THE_GRAPH: Final = ("boundary_", "inline_", "custom_gain")


@cache
def _launcher(name: str) -> Callable[..., Any]:
    from eyesplice.ops import launch, launch_graph

    launched: Callable[..., Any] = getattr(
        launch_graph if name in _OF_THE_GRAPH else launch, name
    )
    return launched


def _cuda(name: str) -> Callable[..., Tensor | None]:
    """An implementation that imports the Triton kernel at its first call."""

    def run(*args: object) -> Tensor | None:
        result: Tensor | None = _launcher(name)(*args)
        return result

    run.__name__ = f"{name}cuda"
    return run


def _short_cut(name: str) -> Any:
    """The op, which a graph's own calls on a GPU reach without torch's dispatcher.

    A compiled graph looks the op up by its name and calls it at every step that no CUDA
    graph holds. The dispatcher turns each argument into a value of its own and back, and
    lets go of the interpreter twice; for plain tensors on a GPU it then does nothing but
    call the implementation. Under a mode (fake tensors, tracing) or a profiler, which
    wants to see the op, calls are dispatched as ever.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    overload: Any = type(op)
    modes = torch._C._len_torch_dispatch_stack
    profiled = torch._C._autograd._profiler_enabled
    dispatched = overload.__call__

    class ShortCut(overload):  # type: ignore[misc]
        def __call__(self, /, *args: Any, **named: Any) -> Any:
            # Inductor names the arguments that have a default.
            plain = args and type(args[0]) is Tensor and args[0].is_cuda
            if not plain or modes() or profiled():
                return dispatched(self, *args, **named)
            return _launcher(name)(*args, **named)

    # The op that graphs hold, pickle and look up stays the one object that it is.
    op.__class__ = ShortCut
    return op


def _past_dispatch(name: str) -> Callable[..., None]:
    """The op for the host, which calls it at each step: on a GPU without dispatch.

    Its arguments are given by position; the second is a tensor.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    on_cuda = _cuda(name)

    def run(*args: Any) -> None:
        (on_cuda if args[1].is_cuda else op)(*args)

    return run


def _register() -> None:
    for name, schema in SCHEMAS.items():
        _library.define(name + schema)
    for name in ("boundary_", "inline_", "custom_gain", "route_", "collect_"):
        on_cpu = reference_graph if name in _OF_THE_GRAPH else reference
        _library.impl(name, getattr(on_cpu, name), "CPU")
        _library.impl(name, _cuda(name), "CUDA")
    _library.impl("anchor", _anchor, "CPU")
    _library.impl("anchor", _anchor, "CUDA")
    _library._register_fake("boundary_", _boundary_fake)
    _library._register_fake("inline_", _nothing)
    _library._register_fake("custom_gain", _custom_gain_fake)
    _library._register_fake("anchor", _anchor)


_register()

boundary_: Final = _short_cut("boundary_")
inline_: Final = _short_cut("inline_")
custom_gain: Final = _short_cut("custom_gain")
anchor: Final = torch.ops.eyesplice.anchor.default
route_: Final = _past_dispatch("route_")
collect_: Final = _past_dispatch("collect_")
