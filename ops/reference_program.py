"""The interpreter of programs: a stage's entries, in order, on the tokens of each row."""

from typing import NamedTuple

import torch
from torch import Tensor

from eyesplice.ops.families import FAMILY_OF
from eyesplice.ops.layout import Header, Opcode, Stage
from eyesplice.ops.reference_gates import gate
from eyesplice.ops.reference_reads import capture, read
from eyesplice.ops.reference_writes import Entry, decode, write
from eyesplice.ops.work import Work


class Tables(NamedTuple):
    """What every entry may look at; `select` and `work` are written."""

    select: Tensor
    program: Tensor
    bank: Tensor
    work: Work
    families: int


def run(value: Tensor, rows: Tensor | None, tables: Tables, stage: Stage) -> None:
    """Run every row's entries of `stage` on its tokens of `value`, fp32, in place.

    Args:
        value: `[tokens, width]` fp32.
        rows: int32 `[tokens]`, their program rows, or None if all are idle.
        tables: select and the rest.
        stage: whose entries run.
    """
    if rows is None:
        return
    for row in rows.unique().tolist():
        if row == 0:
            continue
        ends = tables.program[row, 0, : Header.END_NORMED + 1].tolist()
        first, last = (0, *ends)[stage], ends[stage]
        if first == last:
            continue
        tokens = (rows == row).nonzero()[:, 0]
        for entry in decode(tables.program[row, 1 + first : 1 + last]):
            if FAMILY_OF[Opcode(entry.opcode)] & tables.families:
                _run_entry(value, tokens, entry, tables)


def writes(program: Tensor, rows: Tensor, *fields: Header) -> Tensor:
    """bool `[tokens]`: whether a token's row has a nonzero header field of `fields`."""
    return program[rows.long(), 0][:, list(fields)].any(dim=-1)


def _run_entry(value: Tensor, tokens: Tensor, entry: Entry, tables: Tables) -> None:
    select, _, bank, work, families = tables
    if entry.opcode in (Opcode.COMPARE, Opcode.LOGIC, Opcode.LATCH):
        gate(entry, tokens, select, work)
        return
    bits = select[tokens]
    chosen = tokens[(bits & entry.clause_mask) != 0]
    if entry.counter:
        count(entry.counter, 0, chosen, work)
        count(entry.counter, 1, tokens[(bits & entry.bit) != 0], work)
    if not len(chosen):
        return
    h = value[chosen]
    match entry.opcode:
        case Opcode.READ:
            work.score[chosen, entry.slot] = read(h, entry, bank)
        case Opcode.CAPTURE:
            capture(h, chosen, entry.u, work)
        case _:
            value[chosen] = write(h, entry, bank, families)


def count(counter: int, which: int, tokens: Tensor, work: Work) -> None:
    """Add one for each of `tokens` to its request's counter."""
    slots = work.slot_of_token[tokens].long()
    one = torch.ones_like(slots).int()
    work.counts[:, which, counter - 1].index_add_(0, slots, one)
