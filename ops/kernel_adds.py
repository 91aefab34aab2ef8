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
def _some(p_word, some):
    """`constant`, 0 unless `some`."""
    return tl.load(p_word, mask=some, other=0, eviction_policy="evict_last")


@triton.jit
def _both(p_entry):
    """CLAUSE_MASK and GAIN of an entry, neighbours that one load of 64 bits brings."""
    return (p_entry + CLAUSE_MASK).to(tl.pointer_type(tl.int64))


@triton.jit
def _mask_and_gain(both):
    """What `_both` points to, taken apart."""
    return both.to(tl.int32), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


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
    u_1 = _some(p_row + 2 * _WORDS + U, adds > 1)
    u_2 = _some(p_row + 3 * _WORDS + U, adds > 2)
    u_3 = _some(p_row + 4 * _WORDS + U, adds > 3)
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
    b_u1 = vector(p_bank, bank_stride, u_1, tl.where(adds > 1, m_h, False), o_h)
    b_u2 = vector(p_bank, bank_stride, u_2, tl.where(adds > 2, m_h, False), o_h)
    b_u3 = vector(p_bank, bank_stride, u_3, tl.where(adds > 3, m_h, False), o_h)
    mask, gain = _mask_and_gain(_some(_both(p_row + _WORDS), adds > 0))
    mask_1, gain_1 = _mask_and_gain(_some(_both(p_1), adds > 1))
    mask_2, gain_2 = _mask_and_gain(_some(_both(p_2), adds > 2))
    mask_3, gain_3 = _mask_and_gain(_some(_both(p_3), adds > 3))
    b_h = _add(b_h, b_u, select, mask, gain)
    if adds > 1:
        b_h = _add(b_h, b_u1, select, mask_1, gain_1)
        b_h = _add(b_h, b_u2, select, mask_2, gain_2)
        b_h = _add(b_h, b_u3, select, mask_3, gain_3)
        for i in range(4, adds):
            p_entry = p_row + (1 + i) * _WORDS
            b_u = vector(p_bank, bank_stride, _some(p_entry + U, adds > 1), m_h, o_h)
            mask, gain = _mask_and_gain(_some(_both(p_entry), adds > 1))
            b_h = _add(b_h, b_u, select, mask, gain)
    return b_h


@triton.jit
def run_adds_in_turn(b_h, adds, p_row, p_bits, p_bank, bank_stride, o_h, m_h):
    """As `run_adds`, one vector after another: for few registers.

    Other instances on the multiprocessor fill the time that its loads take.
    """
    select = constant(p_bits)
    p_entry = p_row + _WORDS
    # It always holds. Without it the assembler unrolls the loop, and spills before it.
    some = adds != 0
    for _ in range(adds):
        b_u = vector(p_bank, bank_stride, _some(p_entry + U, some), m_h, o_h)
        mask, gain = _mask_and_gain(_some(_both(p_entry), some))
        b_h = _add(b_h, b_u, select, mask, gain)
        p_entry += _WORDS
    return b_h
