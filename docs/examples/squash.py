"""An op of one's own in Triton: a soft clamp along a direction.

    h += gain * (tanh(p) - p) w / |w|    with p = w.h / |w|

`docs/apps.md` says how an engine comes to run it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _squash_kernel(
    p_value, p_gain, p_weight, value_stride, W: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0)
    gain = tl.load(p_gain + t)
    # The contract: where gain is 0, not one bit of the row may change.
    if gain != 0.0:
        o_h = tl.arange(0, BLOCK)
        m_h = o_h < W
        p_h = p_value + t.to(tl.int64) * value_stride + o_h
        b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
        b_w = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)
        length = tl.sqrt(tl.sum(b_w * b_w, axis=0))
        p = tl.sum(b_w * b_h, axis=0) / length
        tanh = 2.0 * tl.sigmoid(2.0 * p) - 1.0
        b_h += gain * (tanh - p) / length * b_w
        tl.store(p_h, b_h.to(p_value.dtype.element_ty), mask=m_h)


# Without outputs, an op needs no fake but the empty one, which custom_op brings.
@torch.library.custom_op("mylib::squash", mutates_args={"value"})
def squash(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    """value `[tokens, width]`, gain `[tokens]` fp32, weight `[rows, width]`: row 0."""
    num_tokens, width = value.shape
    if num_tokens:
        block = triton.next_power_of_2(width)
        _squash_kernel[(num_tokens,)](
            value, gain, weight, value.stride(0), W=width, BLOCK=block
        )
