"""How far a result may lie from the exact one, as data with reasons.

    |result - exact| <= |low - exact| + rounding * |exact| + DEPTH * 2^-24 * size + tiny

`exact` is computed in float64 from the same inputs, `low` by the reference, and `size`
is the formula run on absolute values: what every partial result is bounded by, so that
cancellation does not make the bound too tight (Higham 2002, chapter 3).
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rounding:
    """The last rounding of a result: relative to it, and absolute near zero."""

    relative: float
    absolute: float
    reason: str


ROUNDING: Final[dict[torch.dtype, Rounding]] = {
    torch.float32: Rounding(2.0**-24, 2.0**-126, "24-bit significand, to nearest"),
    torch.bfloat16: Rounding(2.0**-8, 2.0**-126, "8-bit significand, to nearest"),
    torch.float16: Rounding(2.0**-11, 2.0**-24, "11-bit significand; subnormals"),
}

INTERPRETED: Final[dict[torch.dtype, Rounding]] = ROUNDING | {
    torch.bfloat16: Rounding(
        2.0**-7, 2.0**-126, "Triton's interpreter truncates fp32 to bf16"
    ),
}
"""The same where the kernels run in Triton's interpreter."""

FP32_UNIT: Final = 2.0**-24

DEPTH: Final = 64
"""fp32 roundings between an input and a result, at most.

A sum over a row is at most 32 values in a thread and 10 levels of a tree across the
threads; the rest is a handful of products and sums per entry, the rsqrt and the sigmoid
(a few units each).
"""


def error_bound(
    exact: Tensor,
    size: Tensor,
    low: Tensor,
    *,
    rounding: Rounding,
    roundings: int = 1,
) -> Tensor:
    """The largest allowed `|result - exact|`, element by element.

    Args:
        exact: the formula in float64.
        size: the formula on absolute values in float64.
        low: the reference's result, its own error included in the bound.
        rounding: the row of the table for the result's dtype.
        roundings: how often the value is rounded to that dtype on its way.

    Returns:
        float64, shaped like `exact`.
    """
    own = (low.double() - exact).abs()
    last = roundings * (rounding.relative * exact.abs() + rounding.absolute)
    return own + last + DEPTH * FP32_UNIT * size
