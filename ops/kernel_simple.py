# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""Programs that only add (`eyesplice.ops.simple`), on one row held in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_program import count_entry
from eyesplice.ops.kernel_words import (
    BIAS,
    CLAUSE_MASK,
    COUNTER,
    GAIN,
    IN_SCALE,
    OPCODE,
    U,
    V,
    bank_row,
    constant,
    number,
    vector,
)
from eyesplice.ops.layout import WORDS, Family, Header, Opcode

_WORDS = tl.constexpr(WORDS)
_RANK1 = tl.constexpr(int(Opcode.RANK1))
_FAMILY_RANK1 = tl.constexpr(int(Family.RANK1))
_SIMPLE = tl.constexpr(int(Header.SIMPLE))


@triton.jit
def first_simple(p_row, p_bank, bank_stride, o_h, m_h):
    """(`Header.SIMPLE` of a row, bank[u] of its first entry, u of its second).

    The words of an entry say which vector it needs, so a row is two loads behind; all
    that does not wait for one another is in flight together.
    """
    count = constant(p_row + _SIMPLE)
    u = constant(p_row + _WORDS + U)
    b_u = vector(p_bank, bank_stride, u, tl.where(count > 0, m_h, False), o_h)
    p_next = p_row + 2 * _WORDS + U
    u = tl.load(p_next, mask=count > 1, other=0, eviction_policy="evict_last")
    return count, b_u, u


@triton.jit
def run_simple(
    b_h,
    count,
    b_u,
    u,
    o_h,
    m_h,
    t,
    p_row,
    p_select,
    p_bank,
    bank_stride,
    work,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
):
    """h of token t after `count` simple entries; the rest is what `first_simple` gave.

    `b_h` is `[BLOCK]` fp32, zero outside `m_h`, and so is the result.
    """
    some = count > 0
    p_entry = p_row + _WORDS
    p_bits = p_select + t
    select = tl.load(p_bits, mask=some, other=0, eviction_policy="evict_last")
    # The words of an entry are loaded while the one before it runs.
    opcode = tl.load(p_entry + OPCODE, mask=some, other=0)
    clause_mask = tl.load(p_entry + CLAUSE_MASK, mask=some, other=0)
    gain = tl.load(p_entry + GAIN, mask=some, other=0)
    counter = tl.load(p_entry + COUNTER, mask=some, other=0)
    for i in range(count):
        more = i + 1 < count
        p_next = p_entry + _WORDS
        b_next = vector(p_bank, bank_stride, u, tl.where(more, m_h, False), o_h)
        u = tl.load(p_next + _WORDS + U, mask=i + 2 < count, other=0)
        next_opcode = tl.load(p_next + OPCODE, mask=more, other=0)
        next_mask = tl.load(p_next + CLAUSE_MASK, mask=more, other=0)
        next_gain = tl.load(p_next + GAIN, mask=more, other=0)
        next_counter = tl.load(p_next + COUNTER, mask=more, other=0)
        works = ((OPCODES >> opcode) & 1) != 0
        acts = works & ((select & clause_mask) != 0)
        if acts:
            coefficient = gain.to(tl.float32, bitcast=True)
            if _FAMILY_RANK1 & FAMILIES:
                if opcode == _RANK1:
                    v = tl.load(p_entry + V)
                    b_v = bank_row(p_bank, bank_stride, v, o_h, m_h)
                    p = number(p_entry, IN_SCALE) * tl.sum(b_v * b_h, axis=0)
                    coefficient *= p + number(p_entry, BIAS)
            b_h += coefficient * b_u.to(tl.float32)
        if works & (counter > 0):
            count_entry(t, acts, select, counter, p_entry, work)
        p_entry = p_next
        b_u = b_next
        opcode, clause_mask = next_opcode, next_mask
        gain, counter = next_gain, next_counter
    return b_h
