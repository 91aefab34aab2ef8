# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Entry fields and bank rows, as the device functions load them."""

import triton
import triton.language as tl

from eyesplice.ops.layout import Word

OPCODE = tl.constexpr(int(Word.OPCODE))
FUNCTION = tl.constexpr(int(Word.FUNCTION))
U = tl.constexpr(int(Word.U))
V = tl.constexpr(int(Word.V))
CLAUSE_MASK = tl.constexpr(int(Word.CLAUSE_MASK))
GAIN = tl.constexpr(int(Word.GAIN))
IN_SCALE = tl.constexpr(int(Word.IN_SCALE))
BIAS = tl.constexpr(int(Word.BIAS))
LO = tl.constexpr(int(Word.LO))
HI = tl.constexpr(int(Word.HI))
RANK = tl.constexpr(int(Word.RANK))
BIAS_ROW = tl.constexpr(int(Word.BIAS_ROW))
FLAGS = tl.constexpr(int(Word.FLAGS))
COUNTER = tl.constexpr(int(Word.COUNTER))
SLOT = tl.constexpr(int(Word.SLOT))
BIT = tl.constexpr(int(Word.BIT))


@triton.jit
def constant(p_word):
    """A word that the kernels only read.

    It is read again in every layer, with more weights in between than the cache holds:
    `evict_last` keeps it there, and saves the way to memory.
    """
    return tl.load(p_word, eviction_policy="evict_last")


@triton.jit
def vector(p_bank, bank_stride, row, mask, o_h):
    """`[BLOCK]` bank[row] as stored, zero outside `mask`."""
    p_u = p_bank + row.to(tl.int64) * bank_stride + o_h
    return tl.load(p_u, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def number(p_entry, WORD: tl.constexpr):
    """An fp32 field of an entry."""
    return tl.load(p_entry + WORD).to(tl.float32, bitcast=True)


@triton.jit
def bank_row(p_bank, bank_stride, row, o_h, m_h):
    """`[BLOCK]` fp32, zero outside `m_h`."""
    return vector(p_bank, bank_stride, row, m_h, o_h).to(tl.float32)
