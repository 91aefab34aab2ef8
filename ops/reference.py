"""The specification of every op, in plain torch; also the CPU implementation.

Readable before fast, yet free for idle batches: every op looks once at the words of the
tokens and returns early when they are all 0.
"""

import torch
from torch import Tensor

from eyesplice.ops.layout import Header, Stage
from eyesplice.ops.reference_collect import collect_
from eyesplice.ops.reference_custom import custom_gain
from eyesplice.ops.reference_program import Tables, run, writes
from eyesplice.ops.reference_route import route_
from eyesplice.ops.token_map import ROW_MASK
from eyesplice.ops.work import Work

__all__ = ["boundary_", "collect_", "custom_gain", "inline_", "route_"]


def boundary_(
    stream: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    weight_offset: float,
    eps: float,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
    work: list[Tensor],
    families: int,
    pending: Tensor | None = None,
    defer: bool = False,
) -> Tensor:
    """Residual add and RMSNorm with the tokens' programs run on x, h and y.

    RMSNorm(h) = h / sqrt(mean(h^2) + eps) * weight (Zhang and Sennrich 2019,
    arXiv 1910.07467, eq. 4), in fp32 from the unrounded sum, as vLLM computes it.

    Inductor does not write the stream between attention and MLP either: it adds both
    branches to the old stream at the end of the layer, in fp32. `defer` and `pending`
    do the same, so that an idle token has the bits that it has without eyesplice.

    Args:
        stream: `[tokens, hidden]`, model dtype, contiguous; h is written back to it.
        branch: `[tokens, hidden]`, model dtype, or None for the first norm.
        weight: `[hidden]`, any float dtype.
        weight_offset: added to the weight in fp32 (1.0 for Gemma).
        eps: added to the mean square.
        token_map: int32 `[>= tokens]`, the words of this boundary's tokens, see
            `token_map`; 0 is idle.
        select: int32 `[>= tokens]`, bit j is clause j of the token's program.
        program: int32 `[rows, 1 + max_entries, WORDS]`, this boundary's table.
        bank: `[bank_rows, >= hidden]`, model dtype.
        work: tensors of `layout.WORK`, written by reads, captures and counted entries;
            gates write `select`.
        families: a `Family`; entries of others do nothing.
        pending: the branch of the boundary before, if that one deferred its add.
        defer: leave stream and branch alone, for the next boundary to add them as its
            `pending`. A token whose program writes x or h cannot wait: its h is written
            to `stream`, and zeros to `branch`.

    Returns:
        y: `[tokens, hidden]`, model dtype, contiguous.
    """
    rows = _active_rows(stream, token_map)
    tables = Tables(select, program, bank, Work(*work), families)
    h = stream.float()
    if pending is not None:
        h = h + pending.float()
    elif rows is not None:
        h = h.clone()
    if branch is not None:
        # A branch that is fp32 already is not ours to edit.
        x = branch.float() if rows is None else branch.float().clone()
        run(x, rows, tables, Stage.BRANCH)
        h = h + x
    run(h, rows, tables, Stage.STREAM)
    if not defer:
        stream.copy_(h)
    elif rows is not None:
        assert branch is not None
        now = writes(program, rows, Header.WRITES_BRANCH, Header.WRITES_STREAM)
        stream[now] = h[now].to(stream.dtype)
        branch[now] = 0
    y = h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + eps)
    y = y * (weight.float() + weight_offset)
    run(y, rows, tables, Stage.NORMED)
    return y.to(stream.dtype)


def inline_(
    value: Tensor,
    stage: int,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
    work: list[Tensor],
    families: int,
) -> None:
    """The tokens' entries of one stage, run in place on a value of any row width.

    Args:
        value: `[tokens, width]`, model dtype, contiguous rows; written in place at
            tokens whose program writes this stage.
        stage: a `Stage`; the others of the row are left alone.
        token_map, select, program, bank, work, families: as in `boundary_`; rows of
            `bank` and `capture` are at least `width` wide.
    """
    rows = _active_rows(value, token_map)
    if rows is None:
        return
    result = value.float()
    if result is value:
        result = value.clone()
    tables = Tables(select, program, bank, Work(*work), families)
    run(result, rows, tables, Stage(stage))
    # Other tokens keep their bits: no round trip through fp32.
    written = writes(program, rows, Header(Header.WRITES_BRANCH + stage))
    value[written] = result[written].to(value.dtype)


def _active_rows(value: Tensor, token_map: Tensor) -> Tensor | None:
    """The rows of the value's tokens, or None when every one of them is idle."""
    rows = token_map[: value.shape[0]] & ROW_MASK
    return rows if bool(rows.any()) else None
