"""Gates: bits of `select` that are set or cleared by what was read before."""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyesplice.ops.layout import ClauseKind, Opcode, Reduce, Scope, Slot
from eyesplice.ops.reference_scores import compare, compare_running, counted
from eyesplice.ops.reference_writes import Entry
from eyesplice.ops.work import Work


def gate(entry: Entry, tokens: Tensor, select: Tensor, work: Work) -> None:
    """Set or clear the entry's bit of `select` at `tokens` (int64, ascending)."""
    bits = select[tokens]
    match entry.opcode:
        case Opcode.COMPARE:
            true = _compare(entry, tokens, work)
        case Opcode.LATCH:
            true = _latch(entry, tokens, select, work)
        case _:
            true = _logic(entry, bits)
    select[tokens] = torch.where(true, bits | entry.bit, bits & ~entry.bit)


def _logic(entry: Entry, bits: Tensor) -> Tensor:
    chosen = bits & entry.u
    match entry.function:
        case ClauseKind.AND:
            return chosen == entry.u
        case ClauseKind.OR:
            return chosen != 0
        case _:
            return chosen == 0


def _compare(entry: Entry, tokens: Tensor, work: Work) -> Tensor:
    if entry.u == Reduce.NONE:
        x = work.score[tokens, entry.slot].double()
        return compare(entry.function, x, entry.lo)
    true = torch.zeros_like(tokens, dtype=torch.bool)
    for slot, at, first in _requests(tokens, work):
        fields = work.slots[slot].tolist()
        score = work.score[first : int(tokens[at][-1]) + 1, entry.slot]
        position = torch.arange(len(score), device=score.device)
        position = position + fields[Slot.FIRST_POSITION]
        prompt_len = fields[Slot.PROMPT_LEN]
        running = compare_running(
            entry.function,
            entry.u,
            score,
            counted(score, position, prompt_len, entry.v),
            work.carry[slot, entry.slot],
            entry.lo,
        )
        if entry.v == Scope.PROMPT:
            running &= position >= prompt_len - 1
        true[at] = running[tokens[at] - first]
    return true


def _latch(entry: Entry, tokens: Tensor, select: Tensor, work: Work) -> Tensor:
    true = torch.zeros_like(tokens, dtype=torch.bool)
    for slot, at, first in _requests(tokens, work):
        if int(work.slots[slot, Slot.LATCHED]) & entry.bit:
            true[at] = True
            continue
        hit = (select[first : int(tokens[at][-1]) + 1] & entry.u) != 0
        true[at] = (hit.long().cumsum(0) > 0)[tokens[at] - first]
    return true


def _requests(tokens: Tensor, work: Work) -> Iterator[tuple[int, Tensor, int]]:
    """(slot, which of `tokens` are its own, its first token) of every request."""
    slots = work.slot_of_token[tokens]
    for slot in slots.unique().tolist():
        yield slot, slots == slot, int(work.slots[slot, Slot.FIRST_TOKEN])
