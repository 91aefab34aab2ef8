"""Hooks and replaced norms that run the ops on a model without a graph.

Nothing of it is traced. While a CUDA graph is captured the ops are captured with it; in
a step that runs as Python the host knows whether any token has work, and if none has,
nothing is called: the step is vLLM's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eyesplice.integration.buffers import Buffers
from eyesplice.integration.module_places import Norm, Places, Value
from eyesplice.integration.rehearsal import matrices
from eyesplice.integration.table_op import TableOp
from eyesplice.ops import contracts
from eyesplice.ops.layout import Header, Stage
from eyesplice.ops.token_map import ROW_MASK


def on_value(model: nn.Module, value: Value, act: Callable[[Tensor], None]) -> Any:
    """Let `act` edit a value in place each time that its module is called.

    Returns:
        The hook's handle.
    """
    module = model.get_submodule(value.module)
    if value.side == "output":

        def after(module: nn.Module, args: Any, output: Any) -> None:
            act(matrices(output)[0])

        return module.register_forward_hook(after)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        act((*matrices(args), *matrices(kwargs))[0])

    return module.register_forward_pre_hook(before, with_kwargs=True)


def arm(
    model: nn.Module,
    places: Places,
    buffers: Buffers,
    families: int,
    idle: Callable[[], bool],
) -> None:
    """Put the ops where they were found to belong.

    Args:
        model: the model that the paths start from.
        places: what to arm; all of it is.
        buffers: the tables.
        families: the op families that are compiled in.
        idle: whether this step has nothing to do; never true where a CUDA graph may be
            captured.
    """
    for (table, stage), value in places.values.items():
        op = TableOp(buffers, table, families)
        on_value(model, value, _inline(op, stage, idle))
    for table, norm in places.norms.items():
        module: Any = model.get_submodule(norm.module)
        op = TableOp(buffers, table, families)
        module.forward = _Boundary(op, module, norm, idle)


def _inline(
    op: TableOp, stage: Stage, idle: Callable[[], bool]
) -> Callable[[Tensor], None]:
    def act(value: Tensor) -> None:
        if not idle():
            op.inline(value, stage)

    return act


class _Boundary:
    """A norm's forward: its own, but for the tokens whose program writes here.

    `boundary_` rounds elsewhere than vLLM's eager norm does. So both are computed, and
    a token keeps the bits of vLLM's unless it is written: its neighbours in the batch,
    and tokens that are only read, are as they were.
    """

    def __init__(
        self, op: TableOp, module: Any, norm: Norm, idle: Callable[[], bool]
    ) -> None:
        self._op, self._norm, self._idle = op, norm, idle
        self._weight, self._eps = module.weight, float(module.variance_epsilon)
        self._original = module.forward

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """y, and the stream after it if there was one to add to."""
        if self._idle():
            return (
                self._original(x) if residual is None else self._original(x, residual)
            )
        stream_written, written = self._written(x.shape[0])
        if residual is None:
            # The stream goes on in the buffer of x, which is written in place.
            vanilla = self._original(x)
            y = self._boundary(x, None)
            return torch.where(written, y, vanilla)
        stream = residual.clone()
        y = self._boundary(stream, x)
        vanilla, h = self._original(x, residual)
        return torch.where(written, y, vanilla), torch.where(stream_written, stream, h)

    def _boundary(self, stream: Tensor, branch: Tensor | None) -> Tensor:
        offset = self._norm.weight_offset
        normed: Tensor = contracts.boundary_(
            stream, branch, self._weight, offset, self._eps, *self._op.arguments()
        )
        return normed

    def _written(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """bool `[tokens, 1]`: tokens whose stream is written, and those with any write."""
        rows = (self._op.token_map[:num_tokens] & ROW_MASK).long()
        header = self._op.program[:, 0][rows]
        stream = header[:, Header.WRITES_BRANCH] | header[:, Header.WRITES_STREAM]
        every = stream | header[:, Header.WRITES_NORMED]
        return (stream != 0)[:, None], (every != 0)[:, None]
