"""The ops of the graph on CUDA tensors: a kept launch, or one through Triton.

A step that no CUDA graph holds waits for the host at every boundary, so what is looked at
here, at each call, is what a kept launch depends on and nothing else. Between two calls a
model does much else: what a call costs then is what it has to touch, three times its time
in a loop.
"""

from collections.abc import Hashable
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor

from eyesplice.ops import launch, launch_custom
from eyesplice.ops.launch import choose_launch
from eyesplice.ops.relaunch import Keeps, KeptLaunch
from eyesplice.ops.site_tables import ALIGNED, FOUND, SiteTables, tables_of

_REST: Final = ALIGNED - 1
_MOST: Final = 1 << 14
"""Steps of different sizes whose launches are found at once."""


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
    tables = FOUND.get(program.data_ptr()) or tables_of(program)
    num_tokens, hidden_size = stream.shape
    size = stream.numel()
    p_stream, p_weight = stream.data_ptr(), weight.data_ptr()
    joined = p_stream | p_weight
    plain = stream.is_contiguous() and weight.is_contiguous()
    dtype = stream.dtype
    p_branch = p_pending = branch_dtype = pending_dtype = key = None
    if branch is not None:
        p_branch, branch_dtype = branch.data_ptr(), branch.dtype
        joined |= p_branch
        plain = plain and branch.is_contiguous() and branch.numel() == size
    if pending is not None:
        p_pending, pending_dtype = pending.data_ptr(), pending.dtype
        joined |= p_pending
        plain = plain and pending.is_contiguous() and pending.numel() == size
    if plain and not joined & _REST:
        key = (
            num_tokens,
            hidden_size,
            dtype,
            branch_dtype,
            pending_dtype,
            weight.dtype,
            weight_offset,
            eps,
            families,
            defer,
        )
        kept = tables.launches.get(key) or _of_any_size(tables, key)
        if kept is not None:
            normed = _rows((num_tokens, hidden_size), dtype, stream)
            values = (p_stream, p_branch, p_pending, p_weight, normed.data_ptr())
            kept(num_tokens, values + tables.addresses)
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
        keeps=_keeps(tables, None if key is None else _form(tables, key)),
    )


Key = tuple[int, int, *tuple[Hashable, ...]]
"""(tokens, elements of a row, whatever else a boundary's launch depends on)."""


def _of_any_size(tables: SiteTables, key: Key) -> KeptLaunch | None:
    """A launch that was kept at a step of another size, from now on of this one as well."""
    form = _form(tables, key)
    kept: KeptLaunch | None = tables.launches.get(form)
    if form is not None and kept is not None:
        if len(tables.launches) >= _MOST:
            tables.launches.clear()
        tables.launches[form] = tables.launches[key] = kept
    return kept


def _form(tables: SiteTables, key: Key) -> Hashable | None:
    """What a launch depends on for any number of tokens; None where none is kept."""
    num_tokens, hidden_size, *rest = key
    if not 0 < num_tokens <= tables.room:
        return None
    return choose_launch(hidden_size, num_tokens, tables.max_tokens), hidden_size, *rest


def inline_(value: Tensor, stage: int, program: Tensor, families: int) -> None:
    """`launch.inline_` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine, or a layout that the kernel cannot read.
    """
    tables = FOUND.get(program.data_ptr()) or tables_of(program)
    num_tokens, width = value.shape
    key = None
    if 0 < num_tokens <= tables.room and value.is_contiguous():
        address = value.data_ptr()
        if not address & _REST:
            key = (stage, width, value.dtype, families)
            kept = tables.launches.get(key)
            if kept is not None:
                kept(num_tokens, (address, *tables.addresses))
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
    tables = FOUND.get(program.data_ptr()) or tables_of(program)
    num_tokens = value.shape[0]
    key = ("gain",) if 0 < num_tokens <= tables.room else None
    kept = tables.launches.get(key)
    if kept is not None:
        gain = torch.empty(num_tokens, dtype=torch.float32, device=value.device)
        values = gain.data_ptr(), *tables.addresses, num_tokens
        kept(launch_custom.instances(num_tokens), values)
        return gain
    token_map, select, program, _, work = tables.around(program)
    return launch_custom.custom_gain(
        value, token_map, select, program, work, keeps=_keeps(tables, key)
    )


_EMPTY_ON_CUDA = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""What Inductor's code allocates with: half the time of `torch.empty_like`."""


def _rows(shape: tuple[int, int], dtype: torch.dtype, stream: Tensor) -> Tensor:
    """Memory for as many rows, on the current device, where kernels are launched."""
    if _EMPTY_ON_CUDA is not None and stream.is_cuda:
        return cast(Tensor, _EMPTY_ON_CUDA(shape, (shape[1], 1), dtype))
    return torch.empty_like(stream, memory_format=torch.contiguous_format)


def _keeps(tables: SiteTables, key: Hashable | None) -> Keeps | None:
    """Keeps a launch under a key; None for a launch that is not kept."""
    return None if key is None else partial(tables.launches.__setitem__, key)
