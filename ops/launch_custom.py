"""`custom_gain` on CUDA tensors. Nothing here waits for the device."""

from typing import Final

import torch
from torch import Tensor

from eyesplice.ops.kernel_custom import custom_gain_kernel
from eyesplice.ops.layout import WORDS
from eyesplice.ops.work import Work

BLOCK: Final = 128
"""Tokens that an instance of the kernel looks at."""


def custom_gain(
    value: Tensor,
    row_of_token: Tensor,
    select: Tensor,
    program: Tensor,
    work: list[Tensor],
) -> Tensor:
    """`reference.custom_gain` in one launch.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    num_tokens, state = value.shape[0], Work(*work)
    flat = {"slot_of_token": state.slot_of_token, "counts": state.counts}
    for name, tensor in {
        "row_of_token": row_of_token,
        "select": select,
        **flat,
    }.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, strides {tensor.stride()}")
    if min(row_of_token.numel(), select.numel()) < num_tokens:
        raise ValueError(f"{row_of_token.numel()} map entries for {num_tokens} tokens")
    if program.stride()[1:] != (WORDS, 1):
        raise ValueError(f"program: slots must be contiguous, {program.stride()}")
    gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
    if num_tokens:
        custom_gain_kernel[(-(-num_tokens // BLOCK),)](
            gain,
            row_of_token,
            select,
            program,
            state,
            num_tokens,
            program.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return gain
