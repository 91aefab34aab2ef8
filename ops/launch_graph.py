"""The ops of the graph on CUDA tensors: a kept launch, or one through Triton.

A step that no CUDA graph holds waits for the host at every boundary, so what is looked at
here, at each call, is what a kept launch depends on and nothing else.
"""

from collections.abc import Hashable

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
    key = None
    if (
        0 < num_tokens <= tables.room
        and stream.is_contiguous()
        and weight.is_contiguous()
    ):
        pointers = [stream.data_ptr(), 0, 0, weight.data_ptr()]
        values: list[int | None] = [pointers[0], None, None, pointers[3], None]
        dtypes = [stream.dtype, None, None, weight.dtype]
        plain, size = True, stream.numel()
        if branch is not None:
            plain = branch.is_contiguous() and branch.numel() == size
            values[1] = pointers[1] = branch.data_ptr()
            dtypes[1] = branch.dtype
        if pending is not None:
            plain = plain and pending.is_contiguous() and pending.numel() == size
            values[2] = pointers[2] = pending.data_ptr()
            dtypes[2] = pending.dtype
        a, b, c, d = pointers
        if plain and not (a | b | c | d) & _REST:
            key = (
                choose_launch(hidden_size, num_tokens, tables.token_map.numel()),
                hidden_size,
                *dtypes,
                weight_offset,
                eps,
                families,
                defer,
            )
            kept = tables.launches.get(key)
            if kept is not None:
                normed = torch.empty_like(stream, memory_format=torch.contiguous_format)
                values[4] = normed.data_ptr()
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
    kept = tables.launches.get(key) if key is not None else None
    if kept is not None:
        gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
        kept(launch_custom.instances(num_tokens), (gain.data_ptr(), num_tokens))
        return gain
    token_map, select, program, _, work = tables.around(program)
    return launch_custom.custom_gain(
        value, token_map, select, program, work, keeps=_keeps(tables, key)
    )


def _keeps(tables: SiteTables, key: Hashable | None) -> Keeps | None:
    """Keeps a launch under a key; None for a launch that is not kept."""
    if key is None:
        return None

    def keeps(launched: object) -> None:
        if launched is not None:
            tables.launches[key] = launched

    return keeps
