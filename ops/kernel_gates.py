# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gates: bits of a token's `select` word that follow from what was read before."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_scores import SCORE_UNIT, reduce_scores
from eyesplice.ops.kernel_words import BIT, FUNCTION, LO, SLOT, V, number
from eyesplice.ops.layout import (
    CARRY_WORDS,
    SLOT_WORDS,
    Carry,
    ClauseKind,
    Comparison,
    Opcode,
    Reduce,
    Scope,
    Slot,
)

_COMPARE = tl.constexpr(int(Opcode.COMPARE))
_LATCH = tl.constexpr(int(Opcode.LATCH))

_LESS = tl.constexpr(int(Comparison.LESS))
_LESS_EQUAL = tl.constexpr(int(Comparison.LESS_EQUAL))
_GREATER = tl.constexpr(int(Comparison.GREATER))
_GREATER_EQUAL = tl.constexpr(int(Comparison.GREATER_EQUAL))

_AND = tl.constexpr(int(ClauseKind.AND))
_OR = tl.constexpr(int(ClauseKind.OR))
_NOR = tl.constexpr(int(ClauseKind.NOR))

_OWN = tl.constexpr(int(Reduce.NONE))
_LAST = tl.constexpr(int(Reduce.LAST))
_MEAN = tl.constexpr(int(Reduce.MEAN))
_MAX = tl.constexpr(int(Reduce.MAX))
_PROMPT = tl.constexpr(int(Scope.PROMPT))

_SLOT_WORDS = tl.constexpr(SLOT_WORDS)
_FIRST_TOKEN = tl.constexpr(int(Slot.FIRST_TOKEN))
_FIRST_POSITION = tl.constexpr(int(Slot.FIRST_POSITION))
_PROMPT_LEN = tl.constexpr(int(Slot.PROMPT_LEN))
_LATCHED = tl.constexpr(int(Slot.LATCHED))

_CARRY_WORDS = tl.constexpr(CARRY_WORDS)
_CARRY_SUM = tl.constexpr(int(Carry.SUM))
_CARRY_COUNT = tl.constexpr(int(Carry.COUNT))
_CARRY_MAX = tl.constexpr(int(Carry.MAX))
_CARRY_LAST = tl.constexpr(int(Carry.LAST))

_SCAN = tl.constexpr(256)


@triton.jit
def _carried_number(p_field):
    """The fp32 number whose bits an int64 field of `carry` holds."""
    return tl.load(p_field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _running(t, score, reduce, scope, bound, work, score_stride):
    """(whether any score counts, x, what to compare it with), fp64.

    A mean is never divided out: x is the sum and its bound is scaled by the count,
    which makes the comparison exact.
    """
    slot = tl.load(work.slot_of_token + t)
    p_slot = work.slots + slot * _SLOT_WORDS
    first = tl.load(p_slot + _FIRST_TOKEN)
    position = tl.load(p_slot + _FIRST_POSITION)
    prompt_len = tl.load(p_slot + _PROMPT_LEN)
    p_score = work.score + score
    total, count, highest, last = reduce_scores(
        p_score, score_stride, first, t + 1, position, prompt_len, scope, _SCAN
    )
    p_carry = work.carry + (slot.to(tl.int64) * score_stride + score) * _CARRY_WORDS
    before = tl.load(p_carry + _CARRY_COUNT)
    total += tl.load(p_carry + _CARRY_SUM)
    carried_max = _carried_number(p_carry + _CARRY_MAX)
    higher = (before > 0) & (carried_max > highest)
    highest = tl.where(higher, carried_max, highest)
    p_last = p_score + last.to(tl.int64) * score_stride
    latest = tl.load(p_last, mask=last >= 0, other=0.0)
    latest = tl.where(last >= 0, latest, _carried_number(p_carry + _CARRY_LAST))
    x = tl.where(reduce == _MAX, highest, latest).to(tl.float64)
    x = tl.where(reduce == _MEAN, total.to(tl.float64), x)
    scale = (before + count).to(tl.float64) * SCORE_UNIT
    bound *= tl.where(reduce == _MEAN, scale, 1.0)
    known = before + count > 0
    known &= (scope != _PROMPT) | (position + (t - first) >= prompt_len - 1)
    return known, x, bound


@triton.jit
def _compare(t, u, p_entry, work, score_stride):
    """Whether the score, or its reduction, is less or greater than lo."""
    comparison = tl.load(p_entry + FUNCTION)
    score = tl.load(p_entry + SLOT)
    scope = tl.load(p_entry + V)
    bound = number(p_entry, LO).to(tl.float64)
    x = tl.load(work.score + t.to(tl.int64) * score_stride + score).to(tl.float64)
    known = x == x
    if u != _OWN:
        known, x, bound = _running(t, score, u, scope, bound, work, score_stride)
    true = (x < bound) & (comparison == _LESS)
    true |= (x <= bound) & (comparison == _LESS_EQUAL)
    true |= (x > bound) & (comparison == _GREATER)
    true |= (x >= bound) & (comparison == _GREATER_EQUAL)
    return true & known


@triton.jit
def _latch(t, select, u, bit, p_select, work):
    """Whether this token, or an earlier one of the request, has a bit of u."""
    slot = tl.load(work.slot_of_token + t)
    p_slot = work.slots + slot * _SLOT_WORDS
    latched = tl.load(p_slot + _LATCHED) & bit
    first = tl.load(p_slot + _FIRST_TOKEN)
    o_t = tl.arange(0, _SCAN)
    b_any = tl.zeros([_SCAN], dtype=tl.int32)
    for start in range(first, t, _SCAN):
        b_t = start + o_t
        b_any |= tl.load(p_select + b_t, mask=b_t < t, other=0) & u
    earlier = tl.max((b_any != 0).to(tl.int32), axis=0)
    return (latched != 0) | ((select & u) != 0) | (earlier != 0)


@triton.jit
def gate(t, select, opcode, u, p_entry, p_select, work, score_stride):
    """`select` with the entry's bit set or cleared."""
    bit = tl.load(p_entry + BIT)
    kind = tl.load(p_entry + FUNCTION)
    true = ((select & u) == u) & (kind == _AND)
    true |= ((select & u) != 0) & (kind == _OR)
    true |= ((select & u) == 0) & (kind == _NOR)
    if opcode == _COMPARE:
        true = _compare(t, u, p_entry, work, score_stride)
    if opcode == _LATCH:
        true = _latch(t, select, u, bit, p_select, work)
    return tl.where(true, select | bit, select & ~bit)
