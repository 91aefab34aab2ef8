# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Scores of a request's tokens in this step, reduced so that no order matters."""

import triton
import triton.language as tl

from eyesplice.ops.layout import SCORE_FRACTION_BITS, SCORE_LIMIT, Scope

SCORE_UNIT = tl.constexpr(float(2**SCORE_FRACTION_BITS))
_LIMIT = tl.constexpr(SCORE_LIMIT)

_PROMPT = tl.constexpr(int(Scope.PROMPT))
_GENERATED = tl.constexpr(int(Scope.GENERATED))
_REQUEST = tl.constexpr(int(Scope.REQUEST))


@triton.jit
def _fixed_point(b_x):
    """int64, to nearest, halves up; in fp64, where every step of it is exact."""
    b_x = tl.where(b_x < -_LIMIT, -_LIMIT, tl.where(b_x > _LIMIT, _LIMIT, b_x))
    return tl.floor(b_x.to(tl.float64) * SCORE_UNIT + 0.5).to(tl.int64)


@triton.jit
def reduce_scores(
    p_score,
    score_stride,
    first,
    last,
    position,
    prompt_len,
    scope,
    SCAN: tl.constexpr,
):
    """(fixed-point sum, count, max, last token or -1) of tokens first .. last - 1.

    `p_score` points at the score of token 0; token `first` is at `position`. Tokens
    without a score, or outside `scope`, do not count.
    """
    o_t = tl.arange(0, SCAN)
    b_sum = tl.zeros([SCAN], dtype=tl.int64)
    b_count = tl.zeros([SCAN], dtype=tl.int32)
    b_max = tl.full([SCAN], float("-inf"), dtype=tl.float32)
    b_last = tl.full([SCAN], -1, dtype=tl.int32)
    for start in range(first, last, SCAN):
        b_t = start + o_t
        m_t = b_t < last
        p_x = p_score + b_t.to(tl.int64) * score_stride
        b_x = tl.load(p_x, mask=m_t, other=float("nan"))
        b_p = position + (b_t - first)
        b_at = (scope == _REQUEST) | ((b_p < prompt_len) & (scope == _PROMPT))
        b_at |= (b_p >= prompt_len) & (scope == _GENERATED)
        b_at &= m_t & (b_x == b_x)
        b_x = tl.where(b_at, b_x, 0.0)
        b_sum += _fixed_point(b_x)
        b_count += b_at.to(tl.int32)
        b_max = tl.where(b_at & (b_x > b_max), b_x, b_max)
        b_last = tl.where(b_at, b_t, b_last)
    return (
        tl.sum(b_sum, axis=0),
        tl.sum(b_count, axis=0),
        tl.max(b_max, axis=0),
        tl.max(b_last, axis=0),
    )
