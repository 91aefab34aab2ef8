"""The per-token maps of one step, and the clauses that are true at each token."""

from typing import NamedTuple

import torch
from torch import Tensor

from eyesplice.ops.layout import (
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
    LogHead,
    PerRequest,
    Slot,
)
from eyesplice.ops.token_map import words_of
from eyesplice.ops.work import Work


def route_(
    token_map: Tensor,
    program: Tensor,
    select: Tensor,
    work: list[Tensor],
    per_request: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    token_ids_of_step: Tensor,
    clauses: Tensor,
    token_ids: Tensor,
    token_sets: Tensor,
    num_requests: int,
    extent: int,
    capture_start: int,
    capture_limit: int,
) -> None:
    """Fill the per-token maps for one step, and begin it in the `WORK` tensors.

    Args:
        token_map: int32 `[tables, max_tokens]`, the words of each table's tokens, see
            `token_map`; written in `[:, 0:extent)`. A token is idle in a table where
            its program can do nothing under its clauses, see `acting`; what else is
            written of it does not depend on that.
        program: int32 `[tables, rows, 1 + max_entries, WORDS]`, every table.
        select: int32 `[max_tokens]`, written in `[0, extent)`.
        work: tensors of `layout.WORK`. Written are `slot_of_token` in `[0, extent)`,
            where each request's step begins and what it has `SEEN`, NaN in the `score`
            of tokens whose program has scores, and the head of `capture_log`.
        per_request: int32 `[4, >= num_requests]`, see `PerRequest`.
        query_start_loc: int32 `[>= num_requests + 1]`, first token of each request.
        positions: int64 `[>= tokens]`, position of each token in its request.
        token_ids_of_step: int32 or int64 `[>= tokens]`, the ids of the tokens.
        clauses: int32 `[rows, MAX_CLAUSES, CLAUSE_WORDS]`.
        token_ids, token_sets: see `layout`.
        num_requests: requests in the batch.
        extent: tokens to write; those after the last request become idle.
        capture_start, capture_limit: this step's share of `capture`, in rows.
    """
    state = Work(*work)
    state.capture_log[0, : len(LogHead)] = torch.tensor(
        [0, capture_start, capture_limit], dtype=torch.int32
    )
    starts = query_start_loc[: num_requests + 1].long()
    num_tokens = int(starts[-1]) if num_requests else 0
    for tensor in (token_map, select, state.slot_of_token):
        tensor[..., :extent] = 0
    if not num_tokens:
        return
    lengths = starts[1:] - starts[:-1]
    request = torch.repeat_interleave(
        torch.arange(num_requests, device=lengths.device), lengths
    )
    rows = per_request[PerRequest.ROW][request]
    state.slot_of_token[:num_tokens] = per_request[PerRequest.SLOT][request]
    _begin(state, per_request[:, :num_requests], starts, positions)
    tokens = rows.nonzero()[:, 0]
    if not len(tokens):
        return
    request, rows = request[tokens], rows[tokens].long()
    slots = per_request[PerRequest.SLOT].long()
    view = _View(
        clauses=clauses[rows].long(),
        position=positions[tokens].long(),
        prompt_len=per_request[PerRequest.PROMPT_LEN][request].long(),
        token_id=token_ids_of_step[tokens].long(),
        token_ids=token_ids[rows].long(),
        token_sets=token_sets,
        request=request,
        seen=state.slots[slots[request], Slot.SEEN].long() & _MASK,
    )
    bits = _clause_bits(view)
    select[tokens] = _int32(bits)
    token_map[:, tokens] = words_of(program, rows, select[tokens])
    _remember(state, bits, slots[request])


_MASK = 0xFFFFFFFF


class _View(NamedTuple):
    """What the clauses of the active tokens look at, one row a token, int64.

    `seen` is the word of earlier steps, unsigned like the masks.
    """

    clauses: Tensor
    position: Tensor
    prompt_len: Tensor
    token_id: Tensor
    token_ids: Tensor
    token_sets: Tensor
    request: Tensor
    seen: Tensor


def _begin(state: Work, per_request: Tensor, starts: Tensor, positions: Tensor) -> None:
    """Where each request's step begins; no scores yet."""
    for request in per_request[PerRequest.SLOT].nonzero()[:, 0].tolist():
        first, last = starts[request : request + 2].tolist()
        if first == last:
            continue
        _, prompt_len, slot, num_scores = per_request[:, request].tolist()
        fields = state.slots[slot]
        fields[Slot.FIRST_TOKEN] = first
        fields[Slot.FIRST_POSITION] = int(positions[first])
        fields[Slot.PROMPT_LEN] = prompt_len
        if num_scores:
            state.score[first:last, :num_scores] = torch.nan


def _remember(state: Work, bits: Tensor, slots: Tensor) -> None:
    """SEEN |= the bits of every token of the request."""
    for slot in slots.unique().tolist():
        field = state.slots[slot, Slot.SEEN]
        seen = int(field) & _MASK
        for word in bits[slots == slot].unique().tolist():
            seen |= word
        field.fill_(seen - 2**32 if seen >= 2**31 else seen)


def _clause_bits(view: _View) -> Tensor:
    """`[tokens]` int64, unsigned: bit j is clause j of the token's program."""
    bits = torch.zeros_like(view.position)
    kinds = view.clauses[..., 0]
    for j in kinds.any(dim=0).nonzero()[:, 0].tolist():
        true = torch.zeros_like(bits, dtype=torch.bool)
        for kind in kinds[:, j].unique().tolist():
            true |= (kinds[:, j] == kind) & _truth(ClauseKind(kind), view, j, bits)
        bits |= true.long() << j
    return bits


def _truth(kind: ClauseKind, view: _View, j: int, bits: Tensor) -> Tensor:
    """`[tokens]` bool: clause j, were it of this kind at every token."""
    a, b, flags = view.clauses[:, j, 1:4].unbind(dim=-1)
    # Masks are stored as int32: bring bit 31 back from the sign.
    mask = a & _MASK
    position, prompt_len = view.position, view.prompt_len
    match kind:
        case ClauseKind.FALSE:
            return torch.zeros_like(bits, dtype=torch.bool)
        case ClauseKind.ALL:
            return torch.ones_like(bits, dtype=torch.bool)
        case ClauseKind.PROMPT:
            return position < prompt_len
        case ClauseKind.GENERATED:
            return position >= prompt_len
        case ClauseKind.LAST:
            return position == prompt_len - 1
        case ClauseKind.RANGE:
            from_end = (flags & RANGE_START_FROM_PROMPT_END) != 0
            to_end = (flags & RANGE_STOP_FROM_PROMPT_END) != 0
            start = a + torch.where(from_end, prompt_len, 0)
            stop = b + torch.where(to_end, prompt_len, 0)
            return (start <= position) & (position < stop)
        case ClauseKind.AND:
            return (bits & mask) == mask
        case ClauseKind.OR:
            return (bits & mask) != 0
        case ClauseKind.NOR:
            return (bits & mask) == 0
        case ClauseKind.TOKEN_LIST:
            column = torch.arange(view.token_ids.shape[1], device=view.token_ids.device)
            listed = (a[:, None] <= column) & (column < b[:, None])
            return (listed & (view.token_ids == view.token_id[:, None])).any(dim=-1)
        case ClauseKind.TOKEN_SET:
            return _in_set(view, a)
        case ClauseKind.AFTER:
            return _after(view, (bits & mask) != 0) | ((view.seen & mask) != 0)


def _in_set(view: _View, index: Tensor) -> Tensor:
    """Whether the bit of each token's id is set in row `index` of the token sets."""
    rows, words = view.token_sets.shape
    known = (view.token_id >= 0) & (view.token_id < 32 * words)
    at = torch.where(known, view.token_id, 0)
    word = view.token_sets[index.clamp(0, rows - 1), at // 32].long()
    return known & (((word >> (at % 32)) & 1) != 0)


def _after(view: _View, hit: Tensor) -> Tensor:
    """Whether an earlier token of the same request in this step is a hit."""
    before = hit.long().cumsum(0) - hit.long()
    starts = torch.ones_like(hit)
    starts[1:] = view.request[1:] != view.request[:-1]
    first = (
        torch.where(starts, torch.arange(len(hit), device=hit.device), 0)
        .cummax(0)
        .values
    )
    return before > before[first]


def _int32(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).int()
