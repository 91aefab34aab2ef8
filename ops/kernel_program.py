# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""The loop over a program's entries on one row held in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_gates import gate
from eyesplice.ops.kernel_reads import store_capture, store_score
from eyesplice.ops.kernel_words import (
    BIT,
    CLAUSE_MASK,
    COUNTER,
    GAIN,
    OPCODE,
    U,
    number,
)
from eyesplice.ops.kernel_writes import write
from eyesplice.ops.layout import MAX_FUNCTIONS, WORDS, Family, Opcode

_WORDS = tl.constexpr(WORDS)
_MAX_FUNCTIONS = tl.constexpr(MAX_FUNCTIONS)

_READ = tl.constexpr(int(Opcode.READ))
_CAPTURE = tl.constexpr(int(Opcode.CAPTURE))
_COMPARE = tl.constexpr(int(Opcode.COMPARE))

_FAMILY_READ = tl.constexpr(int(Family.READ))
_FAMILY_GATE = tl.constexpr(int(Family.GATE))
_FAMILY_CAPTURE = tl.constexpr(int(Family.CAPTURE))


@triton.jit
def _count(t, acts, select, counter, p_entry, work):
    """counts[slot] += (whether the entry acts, whether it would but for its gate)."""
    slot = tl.load(work.slot_of_token + t)
    p_count = work.counts + slot * (2 * _MAX_FUNCTIONS) + counter - 1
    if acts:
        tl.atomic_add(p_count, 1, sem="relaxed")
    if (select & tl.load(p_entry + BIT)) != 0:
        tl.atomic_add(p_count + _MAX_FUNCTIONS, 1, sem="relaxed")


@triton.jit
def run_entries(
    b_h,
    select,
    o_h,
    m_h,
    t,
    p_row,
    first,
    last,
    p_select,
    p_bank,
    bank_stride,
    work,
    score_stride,
    capture_stride,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
):
    """(h, select) of token t after entries first .. last - 1, see `Opcode`.

    `b_h` is `[BLOCK]` fp32, zero outside `m_h`; `p_row` is the row's header. What
    `FAMILIES` leaves out is not compiled, and an opcode without its bit in `OPCODES`
    does nothing. The caller stores `select`.
    """
    for i in range(first, last):
        p_entry = p_row + (1 + i) * _WORDS
        opcode = tl.load(p_entry + OPCODE)
        clause_mask = tl.load(p_entry + CLAUSE_MASK)
        u = tl.load(p_entry + U)
        gain = number(p_entry, GAIN)
        counter = tl.load(p_entry + COUNTER)
        works = (((OPCODES >> opcode) & 1) != 0) & (opcode < _COMPARE)
        acts = works & ((select & clause_mask) != 0)
        if acts:
            b_h = write(
                b_h, o_h, m_h, opcode, u, gain, p_entry, p_bank, bank_stride, FAMILIES
            )
            if _FAMILY_READ & FAMILIES:
                if opcode == _READ:
                    store_score(
                        b_h,
                        o_h,
                        m_h,
                        t,
                        p_entry,
                        p_bank,
                        bank_stride,
                        work.score,
                        score_stride,
                    )
            if _FAMILY_CAPTURE & FAMILIES:
                if opcode == _CAPTURE:
                    store_capture(b_h, o_h, m_h, t, u, work, capture_stride)
        if _FAMILY_GATE & FAMILIES:
            if opcode >= _COMPARE:
                select = gate(
                    t, select, opcode, u, p_entry, p_select, work, score_stride
                )
        if works & (counter > 0):
            _count(t, acts, select, counter, p_entry, work)
    return b_h, select
