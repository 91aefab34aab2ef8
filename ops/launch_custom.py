"""`custom_gain` on CUDA tensors. Nothing here waits for the device."""

from typing import Final

import torch
from torch import Tensor

from eyesplice.ops.kernel_custom import custom_gain_kernel
from eyesplice.ops.launch_checks import check_maps, work_of

BLOCK: Final = 128
"""Tokens that an instance of the kernel looks at."""


def custom_gain(
    value: Tensor,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    work: list[Tensor],
) -> Tensor:
    """`reference.custom_gain` in one launch.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    num_tokens, state = value.shape[0], work_of(0, work)
    check_maps(num_tokens, token_map, select, program)
    gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
    if num_tokens:
        custom_gain_kernel[(-(-num_tokens // BLOCK),)](
            gain,
            token_map,
            select,
            program,
            state,
            num_tokens,
            program.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return gain
