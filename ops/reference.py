"""The specification of every op, in plain torch; also the CPU implementation.

Readable before fast, yet free for idle batches: every op looks once at the rows of the
tokens and returns early when they are all 0.
"""

import torch
from torch import Tensor

from eyesplice.ops.layout import (
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    WORDS,
    ClauseKind,
    Function,
    Header,
    Opcode,
    Stage,
    Word,
)


def boundary_(
    stream: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    weight_offset: float,
    eps: float,
    row_of_token: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
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
        row_of_token: int32 `[>= tokens]`, the token's program row; 0 is idle.
        select: int32 `[>= tokens]`, bit j is clause j of the token's program.
        program: int32 `[rows, 1 + max_entries, WORDS]`, this boundary's table.
        bank: `[bank_rows, >= hidden]`, model dtype.
        pending: the branch of the boundary before, if that one deferred its add.
        defer: leave stream and branch alone, for the next boundary to add them as its
            `pending`. A token whose program has entries for x or h cannot wait: its h
            is written to `stream`, and zeros to `branch`.

    Returns:
        y: `[tokens, hidden]`, model dtype, contiguous.
    """
    rows, selected = _token_maps(stream, row_of_token, select)
    h = stream.float()
    if pending is not None:
        h = h + pending.float()
    elif rows is not None:
        h = h.clone()
    if branch is not None:
        # A branch that is fp32 already is not ours to edit.
        x = branch.float() if rows is None else branch.float().clone()
        _run(x, rows, selected, program, bank, Stage.BRANCH)
        h = h + x
    _run(h, rows, selected, program, bank, Stage.STREAM)
    if not defer:
        stream.copy_(h)
    elif rows is not None:
        assert branch is not None
        now = program[rows.long(), 0, Header.END_STREAM] > 0
        stream[now] = h[now].to(stream.dtype)
        branch[now] = 0
    y = h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + eps)
    y = y * (weight.float() + weight_offset)
    _run(y, rows, selected, program, bank, Stage.NORMED)
    return y.to(stream.dtype)


def inline_(
    value: Tensor,
    stage: int,
    row_of_token: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
) -> None:
    """The tokens' entries of one stage, run in place on a value of any row width.

    Args:
        value: `[tokens, width]`, model dtype, contiguous rows; written in place.
        stage: a `Stage`; the others of the row are left alone.
        row_of_token, select, program, bank: as in `boundary_`; bank rows are at least
            `width` wide.
    """
    rows, selected = _token_maps(value, row_of_token, select)
    if rows is None:
        return
    result = value.float()
    if result is value:
        result = value.clone()
    _run(result, rows, selected, program, bank, Stage(stage))
    # Tokens without a program keep their bits: no round trip through fp32.
    active = rows != 0
    value[active] = result[active].to(value.dtype)


def route_(
    row_of_token: Tensor,
    select: Tensor,
    request_row: Tensor,
    prompt_len: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    clauses: Tensor,
    num_requests: int,
    extent: int,
) -> None:
    """Fill the per-token maps for one step.

    Args:
        row_of_token, select: int32 `[max_tokens]`, written in `[0, extent)`.
        request_row: int32 `[>= num_requests]`, program row of each request in the batch.
        prompt_len: int32 `[>= num_requests]`, tokens in each request's prompt.
        query_start_loc: int32 `[>= num_requests + 1]`, first token of each request.
        positions: int64 `[>= tokens]`, position of each token in its request.
        clauses: int32 `[rows, MAX_CLAUSES, CLAUSE_WORDS]`.
        num_requests: requests in the batch.
        extent: tokens to write; those after the last request become idle.
    """
    starts = query_start_loc[: num_requests + 1].long()
    num_tokens = int(starts[-1]) if num_requests else 0
    lengths = starts[1:] - starts[:-1]
    request = torch.repeat_interleave(torch.arange(num_requests), lengths)
    rows = request_row[:num_requests][request]
    row_of_token[:num_tokens] = rows
    row_of_token[num_tokens:extent] = 0
    select[num_tokens:extent] = 0
    select[:num_tokens] = _clause_bits(
        clauses[rows.long()],
        positions[:num_tokens].long(),
        prompt_len[:num_requests][request].long(),
    )


def _clause_bits(clauses: Tensor, position: Tensor, prompt_len: Tensor) -> Tensor:
    """`[tokens]` int32: bit j is clause j of the token's program."""
    bits = torch.zeros_like(position)
    for j in range(clauses.shape[1]):
        kind, a, b, flags = clauses[:, j].long().unbind(dim=-1)
        start = a + torch.where(
            (flags & RANGE_START_FROM_PROMPT_END) != 0, prompt_len, 0
        )
        stop = b + torch.where((flags & RANGE_STOP_FROM_PROMPT_END) != 0, prompt_len, 0)
        # Masks are stored as int32: bring bit 31 back from the sign.
        mask = a & 0xFFFFFFFF
        true = torch.zeros_like(position, dtype=torch.bool)
        true |= kind == ClauseKind.ALL
        true |= (kind == ClauseKind.PROMPT) & (position < prompt_len)
        true |= (kind == ClauseKind.GENERATED) & (position >= prompt_len)
        true |= (kind == ClauseKind.LAST) & (position == prompt_len - 1)
        true |= (kind == ClauseKind.RANGE) & (start <= position) & (position < stop)
        true |= (kind == ClauseKind.AND) & ((bits & mask) == mask)
        true |= (kind == ClauseKind.OR) & ((bits & mask) != 0)
        true |= (kind == ClauseKind.NOR) & ((bits & mask) == 0)
        bits |= true.long() << j
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def _token_maps(
    value: Tensor, row_of_token: Tensor, select: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The rows of the value's tokens, or None when every one of them is idle."""
    num_tokens = value.shape[0]
    rows = row_of_token[:num_tokens]
    return (rows if bool(rows.any()) else None), select[:num_tokens]


def _run(
    value: Tensor,
    rows: Tensor | None,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
    stage: Stage,
) -> None:
    """Run every live row's entries of `stage` on its tokens of `value`, fp32, in place."""
    if rows is None:
        return
    first_field = (None, Header.END_BRANCH, Header.END_STREAM)[stage]
    for row in rows.unique().tolist():
        if row == 0:
            continue
        header = program[row, 0]
        first = 0 if first_field is None else int(header[first_field])
        last = int(header[stage])
        tokens = rows == row
        for entry in program[row, 1 + first : 1 + last]:
            chosen = tokens & ((select & entry[Word.CLAUSE_MASK]) != 0)
            value[chosen] = _apply(value[chosen], entry, bank)


def _apply(h: Tensor, entry: Tensor, bank: Tensor) -> Tensor:
    """One entry on the rows `h` `[tokens, width]`, fp32."""
    assert entry.shape == (WORDS,)
    numbers = entry.view(torch.float32)
    u = bank[int(entry[Word.U]), : h.shape[-1]].float()
    gain = numbers[Word.GAIN]
    match Opcode(int(entry[Word.OPCODE])):
        case Opcode.NONE:
            return h
        case Opcode.ADD:
            return h + gain * u
        case Opcode.RANK1:
            v = bank[int(entry[Word.V]), : h.shape[-1]].float()
            p = numbers[Word.IN_SCALE] * (h @ v) + numbers[Word.BIAS]
            f = _function(
                Function(int(entry[Word.FUNCTION])),
                p,
                numbers[Word.LO],
                numbers[Word.HI],
            )
            return h + gain * f[:, None] * u


def _function(function: Function, p: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    match function:
        case Function.IDENTITY:
            return p
        case Function.RELU:
            return p.relu()
        case Function.SIGMOID:
            return p.sigmoid()
        case Function.STEP:
            return (p >= 0).float()
        case Function.CLIP:
            return p.clamp(lo, hi)
        case Function.TOWARD_CLIP:
            return p.clamp(lo, hi) - p
