"""The ops on CUDA tensors: allocate the output, choose launch parameters, launch.

Arguments are those of the reference. Nothing here waits for the device or reads a
value from it, so every function can be captured in a CUDA graph.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from eyesplice.ops import relaunch
from eyesplice.ops.families import opcodes_of
from eyesplice.ops.kernel_boundary import boundary_kernel
from eyesplice.ops.kernel_inline import inline_kernel
from eyesplice.ops.launch_checks import block_of, check_rows, check_tables, work_of
from eyesplice.ops.launch_custom import custom_gain
from eyesplice.ops.launch_step import collect_, route_
from eyesplice.ops.relaunch import Keeps

__all__ = [
    "Launch",
    "boundary_",
    "choose_launch",
    "collect_",
    "custom_gain",
    "inline_",
    "route_",
]

REGISTERS: Final = 65536
"""32-bit registers of a multiprocessor."""

EARLY_ROWS: Final = 32
"""Rows up to which a boundary starts while the kernel before still runs."""

TABLES: Final = ("p_token_map", "p_select", "p_program")
"""What changes from one place of the ops to the next, `SiteTables.addresses`."""

_VALUES: Final = ("p_stream", "p_branch", "p_pending", "p_weight", "p_normed", *TABLES)
"""What changes from one launch of a boundary to the next."""


class Launch(NamedTuple):
    """How a boundary is launched; all but `warps` change no bit of the result.

    Attributes:
        warps: an instance's. They decide the order in which a row is summed.
        registers: the limit of a thread, which decides how many instances share a
            multiprocessor; None for the compiler's choice.
        simple: whether programs of simple entries that do more than add vectors have a
            loop of their own, beside the general one.
        ahead: whether the vectors of a program that only adds are loaded together, or
            one after another, for fewer registers.
        early: whether to start while the kernel before still runs.
    """

    warps: int
    registers: int | None = None
    simple: bool = True
    ahead: bool = True
    early: bool = False


@lru_cache(maxsize=1 << 14)
def choose_launch(width: int, num_tokens: int, max_tokens: int) -> Launch:
    """Launch parameters for rows of `width` elements.

    The warps never depend on the batch: a token has the same bits in any. They are the
    ones that Inductor takes for the same norm (`_persistent_reduction_configs` in torch
    2.11), which makes an idle row bit-identical to its: 8 elements of a row a thread; a
    single warp for short rows of an engine with large steps.

    The rest was measured on an H200 in chains of boundary and GEMM, rows of 4096. The
    general part of the kernel makes the compiler take 124 registers, so that one
    instance of 16 warps fills a multiprocessor. Once there are more rows than
    multiprocessors, a limit of 64 or 40 lets two or three in. The general part spills
    then, which only it pays for; the loop of simple programs is left out, and under 40
    the vectors of others come one after another, or the idle part would spill too. So
    it would under 40 with 16 elements a thread, where the limit stays 64. An early start
    saves 0.6 us up to 32 rows; with more, the instances that wait are in the way of the
    GEMM before.

    Args:
        width: elements of a row.
        num_tokens: rows of this launch.
        max_tokens: rows of the largest step of this engine.
    """
    early = num_tokens <= EARLY_ROWS and _starts_early()
    if width <= 1024 and max_tokens >= 1024:
        return Launch(warps=1, early=early)
    warps = min(max(block_of(width) // 256, 1), 16)
    rows = max(-(-num_tokens // _multiprocessors()), 1)
    if REGISTERS // (32 * warps * rows) >= 128:
        return Launch(warps, early=early)
    wide = block_of(width) > 256 * warps
    registers = 64 if wide or rows * warps <= 64 else 40
    ahead = registers == 64 and not wide
    return Launch(warps, registers, simple=False, ahead=ahead, early=early)


@lru_cache
def _multiprocessors() -> int:
    """Those of this device; without one an H200's, so that tests meet its launches."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties().multi_processor_count


@lru_cache
def _starts_early() -> bool:
    """Whether the device has programmatic dependent launch: NVIDIA's, from Hopper on."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def boundary_(
    stream: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    weight_offset: float,
    eps: float,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
    work: list[Tensor],
    families: int,
    pending: Tensor | None = None,
    defer: bool = False,
    *,
    round_before_weight: bool = False,
    launch: Launch | None = None,
    keeps: Keeps | None = None,
    ahead: bool = False,
) -> Tensor:
    """`reference.boundary_` in one launch.

    Args:
        stream, branch, pending: rows may be apart, elements of a row may not.
        weight, weight_offset, eps: as there.
        token_map, select, program, bank, work, families: as there.
        round_before_weight: round the normed value to the weight's dtype before the
            product, as eager torch does. Inductor leaves that rounding out.
        launch: launch parameters; chosen from the shape if None.
        keeps: gets the launch, in which stream, branch, pending, weight, the result and
            TABLES may change.
        ahead: launch nothing, but queue the compilation of what would be launched.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    num_tokens, hidden_size = stream.shape
    normed = torch.empty_like(stream, memory_format=torch.contiguous_format)
    launch = launch or choose_launch(hidden_size, num_tokens, token_map.numel())
    check_rows("stream", stream)
    for name, tensor in (("branch", branch), ("pending", pending)):
        if tensor is not None:
            check_rows(name, tensor)
    check_rows("weight", weight)
    check_tables(num_tokens, hidden_size, token_map, select, program, bank)
    state = work_of(hidden_size, work)
    if num_tokens == 0:
        return normed
    values = [value for value in (stream, branch, pending) if value is not None]
    dense = num_tokens == 1 or all(x.stride(0) == hidden_size for x in values)

    def stride(x: Tensor | None) -> int:
        # A single row may claim any stride; a launch that is kept serves more rows.
        return 0 if x is None else hidden_size if dense else x.stride(0)

    args = (
        stream,
        branch,
        pending,
        weight,
        normed,
        token_map,
        select,
        program,
        bank,
        state,
        stride(stream),
        stride(branch),
        stride(pending),
        program.stride(0),
        bank.stride(0),
        state.score.stride(0),
        state.capture.stride(0),
    )
    options: dict[str, Any] = {
        "H": hidden_size,
        "BLOCK": block_of(hidden_size),
        "DENSE": dense,
        "HAS_BRANCH": branch is not None,
        "HAS_PENDING": pending is not None,
        "DEFER": defer,
        "EPS": eps,
        "WEIGHT_OFFSET": weight_offset,
        "ROUND_BEFORE_WEIGHT": round_before_weight,
        "FAMILIES": int(families),
        "OPCODES": opcodes_of(families),
        "EARLY": launch.early,
        "AHEAD": launch.ahead,
        "SIMPLE": launch.simple,
        "num_warps": launch.warps,
        "maxnreg": launch.registers,
        "launch_pdl": launch.early,
    }
    relaunch.launch(
        boundary_kernel,
        num_tokens,
        args,
        options,
        varying=_VALUES,
        keeps=keeps,
        ahead=ahead,
    )
    return normed


def inline_(
    value: Tensor,
    stage: int,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
    work: list[Tensor],
    families: int,
    *,
    keeps: Keeps | None = None,
    ahead: bool = False,
) -> None:
    """`reference.inline_` in one launch.

    Args:
        value: rows may be apart, elements of a row may not.
        stage, token_map, select, program, bank, work, families: as there.
        keeps: gets the launch, in which the value and TABLES may change.
        ahead: as in `boundary_`.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    num_tokens, width = value.shape
    check_rows("value", value)
    check_tables(num_tokens, width, token_map, select, program, bank)
    state = work_of(width, work)
    if num_tokens == 0:
        return
    args = (
        value,
        token_map,
        select,
        program,
        bank,
        state,
        # A single row may claim any stride; a launch that is kept serves more rows.
        width if num_tokens == 1 else value.stride(0),
        program.stride(0),
        bank.stride(0),
        state.score.stride(0),
        state.capture.stride(0),
    )
    options: dict[str, Any] = {
        "W": width,
        "BLOCK": block_of(width),
        "STAGE": int(stage),
        "FAMILIES": int(families),
        "OPCODES": opcodes_of(families),
        "num_warps": choose_launch(width, num_tokens, token_map.numel()).warps,
    }
    relaunch.launch(
        inline_kernel,
        num_tokens,
        args,
        options,
        varying=("p_value", *TABLES),
        keeps=keeps,
        ahead=ahead,
    )
