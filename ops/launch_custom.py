"""`custom_gain` on CUDA tensors. Nothing here waits for the device."""

from typing import Final

import torch
from torch import Tensor

from eyesplice.ops import relaunch
from eyesplice.ops.kernel_custom import custom_gain_kernel
from eyesplice.ops.launch_checks import check_maps, work_of
from eyesplice.ops.relaunch import Keeps

BLOCK: Final = 128
"""Tokens that an instance of the kernel looks at."""


def instances(num_tokens: int) -> int:
    """Instances of the kernel that `num_tokens` take."""
    return -(-num_tokens // BLOCK)


def custom_gain(
    value: Tensor,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    work: list[Tensor],
    *,
    keeps: Keeps | None = None,
    ahead: bool = False,
) -> Tensor:
    """`reference.custom_gain` in one launch.

    Args:
        value, token_map, select, program, work: as there.
        keeps: gets the launch, in which the result, the tables that differ from place
            to place, and the number of tokens may change.
        ahead: as in `launch.boundary_`.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    num_tokens = value.shape[0]
    gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
    state = work_of(0, work)
    check_maps(num_tokens, token_map, select, program)
    if num_tokens == 0:
        return gain
    args = (
        gain,
        token_map,
        select,
        program,
        state,
        num_tokens,
        program.stride(0),
    )
    options = {"BLOCK": BLOCK, "num_warps": 4}
    relaunch.launch(
        custom_gain_kernel,
        instances(num_tokens),
        args,
        options,
        varying=("p_gain", "p_token_map", "p_select", "p_program", "num_tokens"),
        keeps=keeps,
        ahead=ahead,
    )
    return gain
