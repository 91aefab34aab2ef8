"""What a step leaves behind for the next: carried reductions and latches."""

from torch import Tensor

from eyesplice.ops.layout import Carry, PerRequest, Scope, Slot
from eyesplice.ops.reference_scores import counted, fixed_point, from_bits, to_bits
from eyesplice.ops.work import Work


def collect_(
    work: list[Tensor],
    select: Tensor,
    reads: Tensor,
    per_request: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_requests: int,
) -> None:
    """Take one step's scores and latches over into `carry` and `Slot.LATCHED`.

    Args:
        work: tensors of `layout.WORK`.
        select: int32 `[max_tokens]`, as the forward pass left it.
        reads: int32 `[rows, max_scores + 1]`, see `layout`.
        per_request, query_start_loc, positions, num_requests: as in `route_`.
    """
    state = Work(*work)
    for request in per_request[PerRequest.SLOT, :num_requests].nonzero()[:, 0].tolist():
        first, last = query_start_loc[request : request + 2].tolist()
        if first == last:
            continue
        row, prompt_len, slot, num_scores = per_request[:, request].tolist()
        *scopes, latches = reads[row].tolist()
        position = positions[first:last]
        for index, scope in enumerate(scopes[:num_scores]):
            if scope != Scope.NONE:
                score = state.score[first:last, index]
                at = counted(score, position, prompt_len, scope)
                _add(state.carry[slot, index], score[at])
        if latches:
            for word in select[first:last].unique().tolist():
                state.slots[slot, Slot.LATCHED] |= word & latches


def _add(carry: Tensor, score: Tensor) -> None:
    """Scores that count, in the order of their tokens, into their reductions."""
    if not len(score):
        return
    highest = score.max()
    if int(carry[Carry.COUNT]):
        highest = highest.clamp(min=from_bits(carry[Carry.MAX]))
    carry[Carry.SUM] += fixed_point(score).sum()
    carry[Carry.COUNT] += len(score)
    carry[Carry.MAX] = to_bits(highest)
    carry[Carry.LAST] = to_bits(score[-1])
