# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device functions that run a program's entries on one row held in registers."""

import triton
import triton.language as tl

from eyesplice.ops.layout import WORDS, Function, Opcode, Word

_WORDS = tl.constexpr(WORDS)

_OPCODE = tl.constexpr(int(Word.OPCODE))
_FUNCTION = tl.constexpr(int(Word.FUNCTION))
_U = tl.constexpr(int(Word.U))
_V = tl.constexpr(int(Word.V))
_CLAUSE_MASK = tl.constexpr(int(Word.CLAUSE_MASK))
_GAIN = tl.constexpr(int(Word.GAIN))
_IN_SCALE = tl.constexpr(int(Word.IN_SCALE))
_BIAS = tl.constexpr(int(Word.BIAS))
_LO = tl.constexpr(int(Word.LO))
_HI = tl.constexpr(int(Word.HI))

_NONE = tl.constexpr(int(Opcode.NONE))
_RANK1 = tl.constexpr(int(Opcode.RANK1))

_RELU = tl.constexpr(int(Function.RELU))
_SIGMOID = tl.constexpr(int(Function.SIGMOID))
_STEP = tl.constexpr(int(Function.STEP))
_CLIP = tl.constexpr(int(Function.CLIP))
_TOWARD_CLIP = tl.constexpr(int(Function.TOWARD_CLIP))


@triton.jit
def _number(p_entry, WORD: tl.constexpr):
    """An fp32 field of an entry."""
    return tl.load(p_entry + WORD).to(tl.float32, bitcast=True)


@triton.jit
def _apply_function(function, p, lo, hi):
    """f(p); comparisons, not min and max, so that a NaN stays one."""
    clipped = tl.where(p < lo, lo, p)
    clipped = tl.where(clipped > hi, hi, clipped)
    f = tl.where(function == _RELU, tl.where(p < 0.0, 0.0, p), p)
    f = tl.where(function == _SIGMOID, tl.sigmoid(p), f)
    f = tl.where(function == _STEP, tl.where(p >= 0.0, 1.0, 0.0), f)
    f = tl.where(function == _CLIP, clipped, f)
    return tl.where(function == _TOWARD_CLIP, clipped - p, f)


@triton.jit
def run_entries(b_h, o_h, m_h, p_row, select, first, last, p_bank, bank_stride):
    """h += gain * f(in_scale * (v . h) + bias) * u, for entries first .. last - 1.

    `b_h` is `[BLOCK]` fp32, zero outside `m_h`; `p_row` is the row's header.
    """
    for i in range(first, last):
        p_entry = p_row + (1 + i) * _WORDS
        opcode = tl.load(p_entry + _OPCODE)
        clause_mask = tl.load(p_entry + _CLAUSE_MASK)
        u = tl.load(p_entry + _U).to(tl.int64)
        coefficient = _number(p_entry, _GAIN)
        if ((select & clause_mask) != 0) & (opcode != _NONE):
            p_u = p_bank + u * bank_stride + o_h
            b_u = tl.load(p_u, mask=m_h, other=0.0).to(tl.float32)
            if opcode == _RANK1:
                v = tl.load(p_entry + _V).to(tl.int64)
                function = tl.load(p_entry + _FUNCTION)
                in_scale = _number(p_entry, _IN_SCALE)
                bias = _number(p_entry, _BIAS)
                lo = _number(p_entry, _LO)
                hi = _number(p_entry, _HI)
                p_v = p_bank + v * bank_stride + o_h
                b_v = tl.load(p_v, mask=m_h, other=0.0).to(tl.float32)
                p = in_scale * tl.sum(b_v * b_h, axis=0) + bias
                coefficient *= _apply_function(function, p, lo, hi)
            b_h += coefficient * b_u
    return b_h
