# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""The opcodes that write, on one row held in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_words import (
    BIAS,
    BIAS_ROW,
    FLAGS,
    FUNCTION,
    HI,
    IN_SCALE,
    LO,
    RANK,
    V,
    bank_row,
    number,
)
from eyesplice.ops.layout import PRESERVE_NORM, Family, Function, Opcode

_FAMILY_AFFINE = tl.constexpr(int(Family.AFFINE))
_FAMILY_MASK = tl.constexpr(int(Family.MASK))
_FAMILY_PRESERVE_NORM = tl.constexpr(int(Family.PRESERVE_NORM))
_FAMILY_RANK1 = tl.constexpr(int(Family.RANK1))
_FAMILY_REPLACE = tl.constexpr(int(Family.REPLACE))
_FAMILY_ROUTER = tl.constexpr(int(Family.ROUTER))

_RANK1 = tl.constexpr(int(Opcode.RANK1))
_AFFINE = tl.constexpr(int(Opcode.AFFINE))
_REPLACE = tl.constexpr(int(Opcode.REPLACE))
_MASK = tl.constexpr(int(Opcode.MASK))
_ROUTER = tl.constexpr(int(Opcode.ROUTER))

_RELU = tl.constexpr(int(Function.RELU))
_SIGMOID = tl.constexpr(int(Function.SIGMOID))
_STEP = tl.constexpr(int(Function.STEP))
_CLIP = tl.constexpr(int(Function.CLIP))
_TOWARD_CLIP = tl.constexpr(int(Function.TOWARD_CLIP))
_TOWARD_VALUE = tl.constexpr(int(Function.TOWARD_VALUE))

_KEEP_NORM = tl.constexpr(PRESERVE_NORM)


@triton.jit
def _apply_function(function, p, lo, hi):
    """f(p); comparisons, not min and max, so that a NaN stays one."""
    clipped = tl.where(p < lo, lo, p)
    clipped = tl.where(clipped > hi, hi, clipped)
    f = tl.where(function == _RELU, tl.where(p < 0.0, 0.0, p), p)
    f = tl.where(function == _SIGMOID, tl.sigmoid(p), f)
    f = tl.where(function == _STEP, tl.where(p >= 0.0, 1.0, 0.0), f)
    f = tl.where(function == _CLIP, clipped, f)
    f = tl.where(function == _TOWARD_CLIP, clipped - p, f)
    return tl.where(function == _TOWARD_VALUE, tl.where(p > hi, lo - p, lo), f)


@triton.jit
def _projection(b_h, o_h, m_h, p_entry, p_bank, bank_stride):
    """f(in_scale * (v . h) + bias), the coefficient of a rank-1 update."""
    v = tl.load(p_entry + V)
    function = tl.load(p_entry + FUNCTION)
    in_scale = number(p_entry, IN_SCALE)
    bias = number(p_entry, BIAS)
    lo = number(p_entry, LO)
    hi = number(p_entry, HI)
    b_v = bank_row(p_bank, bank_stride, v, o_h, m_h)
    p = in_scale * tl.sum(b_v * b_h, axis=0) + bias
    return _apply_function(function, p, lo, hi)


@triton.jit
def _affine(b_h, o_h, m_h, u, p_entry, p_bank, bank_stride):
    """sum_r f(in_scale * (v_r . h) + b_r) * u_r, every product with the same h."""
    v = tl.load(p_entry + V)
    function = tl.load(p_entry + FUNCTION)
    in_scale = number(p_entry, IN_SCALE)
    lo = number(p_entry, LO)
    hi = number(p_entry, HI)
    bias_row = tl.load(p_entry + BIAS_ROW)
    p_bias = p_bank + bias_row.to(tl.int64) * bank_stride
    b_sum = tl.zeros_like(b_h)
    for r in range(tl.load(p_entry + RANK)):
        b_v = bank_row(p_bank, bank_stride, v + r, o_h, m_h)
        bias = tl.load(p_bias + r, mask=bias_row > 0, other=0.0).to(tl.float32)
        p = in_scale * tl.sum(b_v * b_h, axis=0) + bias
        b_u = bank_row(p_bank, bank_stride, u + r, o_h, m_h)
        b_sum += _apply_function(function, p, lo, hi) * b_u
    return b_sum


@triton.jit
def _router(b_h, m_h, epsilon, b_u):
    """log_softmax(h), with max(s) + epsilon or min(s) - epsilon where u says so."""
    b_z = b_h - tl.max(tl.where(m_h, b_h, float("-inf")), axis=0)
    b_s = b_z - tl.log(tl.sum(tl.where(m_h, tl.exp(b_z), 0.0), axis=0))
    raised = tl.max(tl.where(m_h, b_s, float("-inf")), axis=0) + epsilon
    lowered = tl.min(tl.where(m_h, b_s, float("inf")), axis=0) - epsilon
    b_s = tl.where(b_u > 0.0, raised, tl.where(b_u < 0.0, lowered, b_s))
    return tl.where(m_h, b_s, 0.0)


@triton.jit
def write(
    b_h,
    b_u,
    o_h,
    m_h,
    opcode,
    u,
    gain,
    p_entry,
    p_bank,
    bank_stride,
    FAMILIES: tl.constexpr,
):
    """h after one entry that writes, see `Opcode`; as it was after any other entry.

    `b_h` and `b_u`, the row bank[u], are `[BLOCK]` fp32, zero outside `m_h`, and so is
    the result.
    """
    keep_norm = False
    length = 0.0
    if _FAMILY_PRESERVE_NORM & FAMILIES:
        keep_norm = (tl.load(p_entry + FLAGS) & _KEEP_NORM) != 0
        if keep_norm:
            length = tl.sqrt(tl.sum(b_h * b_h, axis=0))
    if opcode <= _RANK1:
        coefficient = gain
        if _FAMILY_RANK1 & FAMILIES:
            if opcode == _RANK1:
                coefficient *= _projection(b_h, o_h, m_h, p_entry, p_bank, bank_stride)
        b_h += coefficient * b_u
    if _FAMILY_AFFINE & FAMILIES:
        if opcode == _AFFINE:
            b_h += gain * _affine(b_h, o_h, m_h, u, p_entry, p_bank, bank_stride)
    if _FAMILY_REPLACE & FAMILIES:
        if opcode == _REPLACE:
            b_h += gain * (b_u - b_h)
    if _FAMILY_MASK & FAMILIES:
        if opcode == _MASK:
            b_h += gain * b_h * b_u
    if _FAMILY_ROUTER & FAMILIES:
        if opcode == _ROUTER:
            b_h = _router(b_h, m_h, gain, b_u)
    if _FAMILY_PRESERVE_NORM & FAMILIES:
        if keep_norm:
            now = tl.sqrt(tl.sum(b_h * b_h, axis=0))
            b_h *= tl.where(now > 0.0, length / now, 1.0)
    return b_h
