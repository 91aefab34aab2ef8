"""The ops of the graph on CUDA tensors: a kept launch, or one through Triton.

A step that no CUDA graph holds waits for the host at every boundary, so what is looked at
here, at each call, is what a kept launch depends on and nothing else. Between two calls a
model does much else: what a call costs then is what it has to touch, three times its time
in a loop.
"""

from collections.abc import Hashable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from eyesplice.ops import launch, launch_custom
from eyesplice.ops.launch import choose_launch
from eyesplice.ops.relaunch import ALIGNED, Keeps
from eyesplice.ops.site_tables import SiteTables, tables_of

_REST = ALIGNED - 1


def boundary_(
    stream: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    weight_offset: float,
    eps: float,
    program: Tensor,
    families: int,
    pending: Tensor | None = None,
    defer: bool = False,
) -> Tensor:
    """`launch.boundary_` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine, or a layout that the kernel cannot read.
    """
    tables = tables_of(program)
    num_tokens, hidden_size = stream.shape
    size = stream.numel()
    p_stream, p_weight = stream.data_ptr(), weight.data_ptr()
    joined = p_stream | p_weight
    plain = stream.is_contiguous() and weight.is_contiguous()
    p_branch = p_pending = branch_dtype = pending_dtype = key = None
    if branch is not None:
        p_branch, branch_dtype = branch.data_ptr(), branch.dtype
        joined |= p_branch
        plain = plain and branch.is_contiguous() and branch.numel() == size
    if pending is not None:
        p_pending, pending_dtype = pending.data_ptr(), pending.dtype
        joined |= p_pending
        plain = plain and pending.is_contiguous() and pending.numel() == size
    if plain and 0 < num_tokens <= tables.room and not joined & _REST:
        key = (
            choose_launch(hidden_size, num_tokens, tables.max_tokens),
            hidden_size,
            stream.dtype,
            branch_dtype,
            pending_dtype,
            weight.dtype,
            weight_offset,
            eps,
            families,
            defer,
        )
        kept = tables.launches.get(key)
        if kept is not None:
            normed = _rows_like(stream, num_tokens, hidden_size)
            values = (p_stream, p_branch, p_pending, p_weight, normed.data_ptr())
            kept(num_tokens, values)
            return normed
    return launch.boundary_(
        stream,
        branch,
        weight,
        weight_offset,
        eps,
        *tables.around(program),
        families,
        pending,
        defer,
        keeps=_keeps(tables, key),
    )


def inline_(value: Tensor, stage: int, program: Tensor, families: int) -> None:
    """`launch.inline_` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine, or a layout that the kernel cannot read.
    """
    tables = tables_of(program)
    num_tokens, width = value.shape
    key = None
    if 0 < num_tokens <= tables.room and value.is_contiguous():
        address = value.data_ptr()
        if not address & _REST:
            key = (stage, width, value.dtype, families)
            kept = tables.launches.get(key)
            if kept is not None:
                kept(num_tokens, (address,))
                return
    launch.inline_(
        value,
        stage,
        *tables.around(program),
        families,
        keeps=_keeps(tables, key),
    )


def custom_gain(value: Tensor, program: Tensor) -> Tensor:
    """`launch_custom.custom_gain` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine, or a layout that the kernel cannot read.
    """
    tables = tables_of(program)
    num_tokens = value.shape[0]
    key = ("gain",) if 0 < num_tokens <= tables.room else None
    kept = tables.launches.get(key)
    if kept is not None:
        gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
        kept(launch_custom.instances(num_tokens), (gain.data_ptr(), num_tokens))
        return gain
    token_map, select, program, _, work = tables.around(program)
    return launch_custom.custom_gain(
        value, token_map, select, program, work, keeps=_keeps(tables, key)
    )


_EMPTY_ON_CUDA = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""What Inductor's code allocates with: half the time of `torch.empty_like`."""


def _rows_like(stream: Tensor, num_tokens: int, width: int) -> Tensor:
    """Memory for as many rows, on the current device, where kernels are launched."""
    if _EMPTY_ON_CUDA is not None and stream.is_cuda:
        return cast(
            Tensor, _EMPTY_ON_CUDA((num_tokens, width), (width, 1), stream.dtype)
        )
    return torch.empty_like(stream, memory_format=torch.contiguous_format)


def _keeps(tables: SiteTables, key: Hashable | None) -> Keeps | None:
    """Keeps a launch under a key; None for a launch that is not kept."""
    return None if key is None else partial(tables.launches.__setitem__, key)
