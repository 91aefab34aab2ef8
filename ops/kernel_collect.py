# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What a step leaves behind for the next: carried reductions and latches."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_route import bits_or
from eyesplice.ops.kernel_scores import reduce_scores
from eyesplice.ops.layout import CARRY_WORDS, SLOT_WORDS, Carry, PerRequest, Slot

_ROW = tl.constexpr(int(PerRequest.ROW))
_PROMPT_LEN = tl.constexpr(int(PerRequest.PROMPT_LEN))
_SLOT = tl.constexpr(int(PerRequest.SLOT))
_SCORES = tl.constexpr(int(PerRequest.SCORES))

_SLOT_WORDS = tl.constexpr(SLOT_WORDS)
_LATCHED = tl.constexpr(int(Slot.LATCHED))

_CARRY_WORDS = tl.constexpr(CARRY_WORDS)
_SUM = tl.constexpr(int(Carry.SUM))
_COUNT = tl.constexpr(int(Carry.COUNT))
_MAX = tl.constexpr(int(Carry.MAX))
_LAST = tl.constexpr(int(Carry.LAST))


@triton.jit
def _carry_score(
    p_score,
    p_carry,
    score_stride,
    first,
    last,
    position,
    prompt_len,
    scope,
    BLOCK: tl.constexpr,
):
    """Add the scores of tokens first .. last - 1 to their reductions."""
    total, count, highest, last_at = reduce_scores(
        p_score, score_stride, first, last, position, prompt_len, scope, BLOCK
    )
    if count > 0:
        before = tl.load(p_carry + _COUNT)
        carried = tl.load(p_carry + _MAX).to(tl.int32).to(tl.float32, bitcast=True)
        highest = tl.where((before > 0) & (carried > highest), carried, highest)
        latest = tl.load(p_score + last_at.to(tl.int64) * score_stride)
        tl.store(p_carry + _SUM, tl.load(p_carry + _SUM) + total)
        tl.store(p_carry + _COUNT, before + count)
        tl.store(p_carry + _MAX, highest.to(tl.int32, bitcast=True).to(tl.int64))
        tl.store(p_carry + _LAST, latest.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def collect_kernel(
    work,
    p_select,
    p_reads,
    p_per_request,
    p_query_start_loc,
    p_positions,
    reads_stride,
    per_request_stride,
    score_stride,
    MAX_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """carry[slot, k] += scores of the step, slots[slot, LATCHED] |= its latches.

    Instance i does request i; one without a slot, or without a token, has nothing.
    """
    i = tl.program_id(0)
    first = tl.load(p_query_start_loc + i)
    last = tl.load(p_query_start_loc + i + 1)
    p_request = p_per_request + i
    slot = tl.load(p_request + _SLOT * per_request_stride)
    if (slot != 0) & (first < last):
        row = tl.load(p_request + _ROW * per_request_stride)
        prompt_len = tl.load(p_request + _PROMPT_LEN * per_request_stride)
        position = tl.load(p_positions + first).to(tl.int32)
        p_row = p_reads + row.to(tl.int64) * reads_stride
        p_carry = work.carry + slot.to(tl.int64) * score_stride * _CARRY_WORDS
        for k in range(tl.load(p_request + _SCORES * per_request_stride)):
            scope = tl.load(p_row + k)
            if scope != 0:
                _carry_score(
                    work.score + k,
                    p_carry + k * _CARRY_WORDS,
                    score_stride,
                    first,
                    last,
                    position,
                    prompt_len,
                    scope,
                    BLOCK,
                )
        latches = tl.load(p_row + MAX_SCORES)
        if latches != 0:
            o_t = tl.arange(0, BLOCK)
            b_true = tl.zeros([BLOCK], dtype=tl.int32)
            for start in range(first, last, BLOCK):
                b_t = start + o_t
                b_true |= tl.load(p_select + b_t, mask=b_t < last, other=0)
            p_latched = work.slots + slot * _SLOT_WORDS + _LATCHED
            true = tl.reduce(b_true, 0, bits_or) & latches
            tl.store(p_latched, tl.load(p_latched) | true)
