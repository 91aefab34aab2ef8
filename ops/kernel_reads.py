# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The opcodes that read, on one row held in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_words import (
    BIAS,
    FUNCTION,
    HI,
    IN_SCALE,
    SLOT,
    V,
    bank_row,
    number,
)
from eyesplice.ops.layout import LOG_WORDS, SLOT_WORDS, LogHead, LogRow, Score, Slot

_SLOT_WORDS = tl.constexpr(SLOT_WORDS)
_FIRST_TOKEN = tl.constexpr(int(Slot.FIRST_TOKEN))
_FIRST_POSITION = tl.constexpr(int(Slot.FIRST_POSITION))
_LOST = tl.constexpr(int(Slot.LOST))

_LOG_WORDS = tl.constexpr(LOG_WORDS)
_COUNT = tl.constexpr(int(LogHead.COUNT))
_START = tl.constexpr(int(LogHead.START))
_LIMIT = tl.constexpr(int(LogHead.LIMIT))
_LOG_SLOT = tl.constexpr(int(LogRow.SLOT))
_LOG_CAPTURE = tl.constexpr(int(LogRow.CAPTURE))
_LOG_POSITION = tl.constexpr(int(LogRow.POSITION))

_SIGMOID = tl.constexpr(int(Score.SIGMOID))
_RELU = tl.constexpr(int(Score.RELU))
_JUMP_RELU = tl.constexpr(int(Score.JUMP_RELU))
_COSINE = tl.constexpr(int(Score.COSINE))
_NORM = tl.constexpr(int(Score.NORM))
_DISTANCE = tl.constexpr(int(Score.DISTANCE))
_TANH_COSINE = tl.constexpr(int(Score.TANH_COSINE))


@triton.jit
def _length(b_h):
    return tl.sqrt(tl.sum(b_h * b_h, axis=0))


@triton.jit
def _tanh(b_x):
    """tanh to a few fp32 units, by its series where 1 - 2 / (e^2x + 1) cancels."""
    b_s = b_x * b_x
    b_small = 62.0 / 2835 - b_s * (1382.0 / 155925)
    b_small = -1.0 / 3 + b_s * (2.0 / 15 + b_s * (-17.0 / 315 + b_s * b_small))
    b_large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(b_x)) + 1.0)
    b_large = tl.where(b_x < 0.0, -b_large, b_large)
    return tl.where(b_s < 0.0625, b_x + b_x * b_s * b_small, b_large)


@triton.jit
def _score(b_h, o_h, m_h, p_entry, p_bank, bank_stride):
    """The entry's `Score` of h; comparisons, not max, so that a NaN stays one."""
    function = tl.load(p_entry + FUNCTION)
    in_scale = number(p_entry, IN_SCALE)
    bias = number(p_entry, BIAS)
    hi = number(p_entry, HI)
    b_v = bank_row(p_bank, bank_stride, tl.load(p_entry + V), o_h, m_h)
    dot = tl.sum(b_v * b_h, axis=0)
    p = in_scale * dot + bias
    score = tl.where(function == _SIGMOID, tl.sigmoid(p), p)
    score = tl.where((function == _RELU) & (p < 0.0), 0.0, score)
    score = tl.where((function == _JUMP_RELU) & (p <= hi), 0.0, score)
    if function >= _COSINE:
        score = _length(b_h)
        if function == _DISTANCE:
            score = _length(b_h - b_v)
        if (function == _COSINE) | (function == _TANH_COSINE):
            if function == _TANH_COSINE:
                b_v = _tanh(dot / tl.sum(b_v * b_v, axis=0) * b_v)
                dot = tl.sum(b_v * b_h, axis=0)
            size = score * _length(b_v)
            score = dot / tl.where(size < 1e-12, 1e-12, size)
    return score


@triton.jit
def store_score(b_h, o_h, m_h, t, p_entry, p_bank, bank_stride, p_score, score_stride):
    """score[t, slot] = the entry's score of h, for the gates behind it to see."""
    score = _score(b_h, o_h, m_h, p_entry, p_bank, bank_stride)
    slot = tl.load(p_entry + SLOT)
    tl.store(p_score + t.to(tl.int64) * score_stride + slot, score)
    tl.debug_barrier()


@triton.jit
def store_capture(b_h, o_h, m_h, t, capture_index, work, capture_stride):
    """Append h to `capture`, or count it as lost where this step's share is full."""
    index = tl.atomic_add(work.capture_log + _COUNT, 1, sem="relaxed")
    slot = tl.load(work.slot_of_token + t)
    p_slot = work.slots + slot * _SLOT_WORDS
    if index < tl.load(work.capture_log + _LIMIT):
        row = (tl.load(work.capture_log + _START) + index).to(tl.int64)
        p_row = work.capture + row * capture_stride + o_h
        tl.store(p_row, b_h.to(work.capture.dtype.element_ty), mask=m_h)
        ahead = t - tl.load(p_slot + _FIRST_TOKEN)
        p_log = work.capture_log + (1 + row) * _LOG_WORDS
        tl.store(p_log + _LOG_SLOT, slot)
        tl.store(p_log + _LOG_CAPTURE, capture_index)
        tl.store(p_log + _LOG_POSITION, tl.load(p_slot + _FIRST_POSITION) + ahead)
    else:
        tl.atomic_add(p_slot + _LOST, 1, sem="relaxed")
