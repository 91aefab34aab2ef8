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

_ADD = tl.constexpr(int(Opcode.ADD))
_ROUTER = tl.constexpr(int(Opcode.ROUTER))
_READ = tl.constexpr(int(Opcode.READ))
_CAPTURE = tl.constexpr(int(Opcode.CAPTURE))
_COMPARE = tl.constexpr(int(Opcode.COMPARE))

_FAMILY_READ = tl.constexpr(int(Family.READ))
_FAMILY_GATE = tl.constexpr(int(Family.GATE))
_FAMILY_CAPTURE = tl.constexpr(int(Family.CAPTURE))


@triton.jit
def count_entry(t, acts, select, counter, p_entry, work):
    """counts[slot] += (whether the entry acts, whether it would but for its gate)."""
    slot = tl.load(work.slot_of_token + t)
    p_count = work.counts + slot * (2 * _MAX_FUNCTIONS) + counter - 1
    if acts:
        tl.atomic_add(p_count, 1, sem="relaxed")
    if (select & tl.load(p_entry + BIT)) != 0:
        tl.atomic_add(p_count + _MAX_FUNCTIONS, 1, sem="relaxed")


@triton.jit
def _vector(p_bank, bank_stride, opcode, u, o_h, m_h):
    """`[BLOCK]` bank[u] as stored, zero for an opcode that has no such row."""
    m_u = tl.where((opcode >= _ADD) & (opcode <= _ROUTER), m_h, False)
    p_u = p_bank + u.to(tl.int64) * bank_stride + o_h
    return tl.load(p_u, mask=m_u, other=0.0)


@triton.jit
def prefetch(p_row, first, end, p_bank, bank_stride, o_h, m_h):
    """What `run_entries` needs of entries first and first + 1 to begin with `first`.

    The words of an entry say which vector it needs, so a row is two loads behind; of
    the entries of one program, those loads are in flight together.
    """
    p_entry = p_row + (1 + first) * _WORDS
    some = first < end
    more = first + 1 < end
    opcode = tl.load(p_entry + OPCODE, mask=some, other=0)
    u = tl.load(p_entry + U, mask=some, other=0)
    next_opcode = tl.load(p_entry + _WORDS + OPCODE, mask=more, other=0)
    next_u = tl.load(p_entry + _WORDS + U, mask=more, other=0)
    b_u = _vector(p_bank, bank_stride, opcode, u, o_h, m_h)
    return opcode, u, b_u, next_opcode, next_u


@triton.jit
def run_entries(
    b_h,
    select,
    ahead,
    o_h,
    m_h,
    t,
    p_row,
    first,
    last,
    end,
    p_select,
    p_bank,
    bank_stride,
    work,
    score_stride,
    capture_stride,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
):
    """(h, select, ahead) of token t after entries first .. last - 1, see `Opcode`.

    `b_h` is `[BLOCK]` fp32, zero outside `m_h`; `p_row` is the row's header; `ahead` is
    what `prefetch` gave for `first`, and is returned for `last`; entries from `end` on
    are not touched. What `FAMILIES` leaves out is not compiled, and an opcode without
    its bit in `OPCODES` does nothing. The caller stores `select`.
    """
    opcode, u, b_u, next_opcode, next_u = ahead
    for i in range(first, last):
        p_entry = p_row + (1 + i) * _WORDS
        # In flight while this entry runs: the next one's vector, and the words behind.
        b_next = _vector(p_bank, bank_stride, next_opcode, next_u, o_h, m_h)
        later_opcode = tl.load(p_entry + 2 * _WORDS + OPCODE, mask=i + 2 < end, other=0)
        later_u = tl.load(p_entry + 2 * _WORDS + U, mask=i + 2 < end, other=0)
        clause_mask = tl.load(p_entry + CLAUSE_MASK)
        gain = number(p_entry, GAIN)
        counter = tl.load(p_entry + COUNTER)
        works = (((OPCODES >> opcode) & 1) != 0) & (opcode < _COMPARE)
        acts = works & ((select & clause_mask) != 0)
        if acts:
            b_h = write(
                b_h,
                b_u.to(tl.float32),
                o_h,
                m_h,
                opcode,
                u,
                gain,
                p_entry,
                p_bank,
                bank_stride,
                FAMILIES,
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
            count_entry(t, acts, select, counter, p_entry, work)
        opcode, u, b_u = next_opcode, next_u, b_next
        next_opcode, next_u = later_opcode, later_u
    return b_h, select, (opcode, u, b_u, next_opcode, next_u)
