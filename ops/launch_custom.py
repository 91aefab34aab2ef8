"""`custom_gain` on CUDA tensors. Nothing here waits for the device."""

from typing import Final

import torch
from torch import Tensor

from eyesplice.ops.kernel_custom import custom_gain_kernel
from eyesplice.ops.launch_checks import check_maps, work_of
from eyesplice.ops.relaunch import Relaunch

BLOCK: Final = 128
"""Tokens that an instance of the kernel looks at."""

_GAIN: Final = Relaunch(custom_gain_kernel, ("p_gain", "num_tokens"))


def custom_gain(
    value: Tensor,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    work: list[Tensor],
    *,
    ahead: bool = False,
) -> Tensor:
    """`reference.custom_gain` in one launch; `ahead` as in `launch.boundary_`.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    num_tokens = value.shape[0]
    gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
    call = (
        -(-num_tokens // BLOCK),
        (program, token_map, select, *work),
        (gain, num_tokens),
    )
    room = min(token_map.numel(), select.numel())
    if 0 < num_tokens <= room and not ahead and _GAIN.again(*call):
        return gain
    state = work_of(0, work)
    check_maps(num_tokens, token_map, select, program)
    if num_tokens:
        _GAIN.launch(
            *call,
            gain,
            token_map,
            select,
            program,
            state,
            num_tokens,
            program.stride(0),
            BLOCK=BLOCK,
            ahead=ahead,
            num_warps=4,
        )
    return gain
