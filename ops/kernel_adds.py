# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Programs that add a few vectors and do nothing else, on one row held in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_words import CLAUSE_MASK, U, constant, vector
from eyesplice.ops.layout import WORDS
from eyesplice.ops.token_map import ROW_BITS, VECTOR_MASK

_WORDS = tl.constexpr(WORDS)
_ROW_BITS = tl.constexpr(ROW_BITS)
_VECTOR_MASK = tl.constexpr(VECTOR_MASK)


@triton.jit
def _vector_number(p_entry, some):
    """U of an entry, 0 unless `some`."""
    return tl.load(p_entry + U, mask=some, other=0, eviction_policy="evict_last")


@triton.jit
def _mask_and_gain(p_entry, some):
    """(CLAUSE_MASK, GAIN) of an entry in one load of 64 bits, 0 unless `some`."""
    p_both = (p_entry + CLAUSE_MASK).to(tl.pointer_type(tl.int64))
    both = tl.load(p_both, mask=some, other=0, eviction_policy="evict_last")
    gain = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return both.to(tl.int32), gain


@triton.jit
def _add(b_h, b_u, select, clause_mask, gain):
    """h + gain * u where the entry's clauses hold, else h to the last bit.

    No branch: the compiler would load the vector behind it.
    """
    acts = (select & clause_mask) != 0
    return tl.where(acts, b_h + gain * b_u.to(tl.float32), b_h)


@triton.jit
def first_adds(word, adds, p_row, p_bits, p_bank, bank_stride, o_h, m_h):
    """All that waits for the token's word and for nothing else.

    Returns:
        bank[u] of the first entry, U of the second to the fourth, and the token's
        `select`.
    """
    u = (word >> _ROW_BITS) & _VECTOR_MASK
    b_u = vector(p_bank, bank_stride, u, m_h, o_h)
    u_1 = _vector_number(p_row + 2 * _WORDS, adds > 1)
    u_2 = _vector_number(p_row + 3 * _WORDS, adds > 2)
    u_3 = _vector_number(p_row + 4 * _WORDS, adds > 3)
    return b_u, u_1, u_2, u_3, constant(p_bits)


@triton.jit
def run_adds(b_h, adds, first, p_row, p_bank, bank_stride, o_h, m_h):
    """h of a token after its `adds` vectors, in the order of the entries.

    The second to the fourth vector are in flight together: a program of four waits for
    three loads in a row, its word's, the vectors' numbers' and the vectors'.

    `b_h` is `[BLOCK]` fp32, zero outside `m_h`, and so is the result; `first` is what
    `first_adds` gave.
    """
    b_u, u_1, u_2, u_3, select = first
    p_1 = p_row + 2 * _WORDS
    p_2 = p_row + 3 * _WORDS
    p_3 = p_row + 4 * _WORDS
    b_u1 = vector(p_bank, bank_stride, u_1, m_h & (adds > 1), o_h)
    b_u2 = vector(p_bank, bank_stride, u_2, m_h & (adds > 2), o_h)
    b_u3 = vector(p_bank, bank_stride, u_3, m_h & (adds > 3), o_h)
    mask, gain = _mask_and_gain(p_row + _WORDS, adds > 0)
    mask_1, gain_1 = _mask_and_gain(p_1, adds > 1)
    mask_2, gain_2 = _mask_and_gain(p_2, adds > 2)
    mask_3, gain_3 = _mask_and_gain(p_3, adds > 3)
    b_h = _add(b_h, b_u, select, mask, gain)
    if adds > 1:
        b_h = _add(b_h, b_u1, select, mask_1, gain_1)
        b_h = _add(b_h, b_u2, select, mask_2, gain_2)
        b_h = _add(b_h, b_u3, select, mask_3, gain_3)
        for i in tl.range(4, adds, loop_unroll_factor=1):
            p_entry = p_row + (1 + i) * _WORDS
            b_u = vector(p_bank, bank_stride, _vector_number(p_entry, True), m_h, o_h)
            mask, gain = _mask_and_gain(p_entry, True)
            b_h = _add(b_h, b_u, select, mask, gain)
    return b_h


@triton.jit
def run_adds_in_turn(b_h, adds, p_row, p_bits, p_bank, bank_stride, o_h, m_h):
    """As `run_adds`, one vector after another: for few registers.

    Other instances on the multiprocessor fill the time that its loads take.
    """
    select = constant(p_bits)
    p_entry = p_row + _WORDS
    for _ in tl.range(adds, loop_unroll_factor=1):
        b_u = vector(p_bank, bank_stride, _vector_number(p_entry, True), m_h, o_h)
        mask, gain = _mask_and_gain(p_entry, True)
        b_h = _add(b_h, b_u, select, mask, gain)
        p_entry += _WORDS
    return b_h
