"""Reductions of scores: which tokens count, and sums that no order of adding changes."""

import torch
from torch import Tensor

from eyesplice.ops.layout import (
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    Carry,
    Comparison,
    Reduce,
    Scope,
)


def fixed_point(score: Tensor) -> Tensor:
    """int64 in units of 2**-SCORE_FRACTION_BITS, to nearest, halves up; NaN is 0."""
    exact = score.double().nan_to_num().clamp(-SCORE_LIMIT, SCORE_LIMIT)
    return torch.floor(exact * 2**SCORE_FRACTION_BITS + 0.5).long()


def counted(score: Tensor, position: Tensor, prompt_len: int, scope: int) -> Tensor:
    """Which tokens have a score that a reduction over `scope` takes in."""
    match Scope(scope):
        case Scope.PROMPT:
            within = position < prompt_len
        case Scope.GENERATED:
            within = position >= prompt_len
        case Scope.REQUEST:
            within = torch.ones_like(score, dtype=torch.bool)
        case Scope.NONE:
            within = torch.zeros_like(score, dtype=torch.bool)
    return within & ~score.isnan()


def compare(comparison: int, x: Tensor, bound: Tensor | float) -> Tensor:
    """A `Comparison`; false where x is NaN."""
    match Comparison(comparison):
        case Comparison.LESS:
            return x < bound
        case Comparison.LESS_EQUAL:
            return x <= bound
        case Comparison.GREATER:
            return x > bound
        case Comparison.GREATER_EQUAL:
            return x >= bound


def compare_running(
    comparison: int,
    reduce: int,
    score: Tensor,
    at: Tensor,
    carry: Tensor,
    bound: float,
) -> Tensor:
    """Compare the running reduction at each token of a request with `bound`.

    Args:
        comparison, reduce: a `Comparison`, a `Reduce`.
        score: fp32 `[tokens]` of this step.
        at: bool `[tokens]`, which of them count.
        carry: int64 `[CARRY_WORDS]`, the same over earlier steps.
        bound: what to compare with.

    Returns:
        bool `[tokens]`; false where no score was counted yet. A mean is never divided
        out: the sum is compared with `bound` times the count, which is exact.
    """
    before = int(carry[Carry.COUNT])
    count = at.long().cumsum(0) + before
    match Reduce(reduce):
        case Reduce.MEAN:
            sums = torch.where(at, fixed_point(score), 0).cumsum(0) + carry[Carry.SUM]
            bounds = bound * (count.double() * 2**SCORE_FRACTION_BITS)
            return (count > 0) & compare(comparison, sums.double(), bounds)
        case Reduce.MAX:
            start = from_bits(carry[Carry.MAX]) if before else -torch.inf
            x = torch.where(at, score, -torch.inf).cummax(0).values.clamp(min=start)
        case Reduce.LAST:
            index = (
                torch.where(at, torch.arange(len(at), device=at.device), -1)
                .cummax(0)
                .values
            )
            start = from_bits(carry[Carry.LAST])
            x = torch.where(index < 0, start, score[index.clamp(min=0)])
        case Reduce.NONE:
            raise AssertionError("a token's own score is no reduction")
    return (count > 0) & compare(comparison, x.double(), bound)


def from_bits(bits: Tensor) -> float:
    """The fp32 number whose bits a field of `carry` holds."""
    return float(bits.int().view(torch.float32))


def to_bits(number: Tensor) -> int:
    """The bits of an fp32 number, as an int32."""
    return int(number.view(torch.int32))
