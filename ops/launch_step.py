"""The ops that the host launches itself, before a step and after it.

Arguments are those of the reference. Nothing here waits for the device.
"""

from typing import Final

from torch import Tensor

from eyesplice.ops.kernel_collect import collect_kernel
from eyesplice.ops.kernel_route import route_kernel
from eyesplice.ops.launch_checks import block_of, check_program, check_rows, work_of
from eyesplice.ops.relaunch import Relaunch

ROUTE_BLOCK: Final = 1024
"""Tokens that an instance of the route kernel fills at once."""

MAP_TABLES: Final = 16
MAP_TOKENS: Final = 128
"""How much of the maps an instance of the route kernel fills at once."""

COLLECT_BLOCK: Final = 256
"""Tokens that an instance of the collect kernel reduces at once."""

_LISTS: Final = ("p_per_request", "p_query_start_loc", "p_positions")
_COUNTS: Final = ("num_requests", "extent", "capture_start", "capture_limit")
_ROUTE: Final = Relaunch(route_kernel, (*_LISTS, "p_token_ids_of_step", *_COUNTS))
_COLLECT: Final = Relaunch(collect_kernel, _LISTS)


def route_(
    token_map: Tensor,
    program: Tensor,
    select: Tensor,
    work: list[Tensor],
    per_request: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    token_ids_of_step: Tensor,
    clauses: Tensor,
    token_ids: Tensor,
    token_sets: Tensor,
    num_requests: int,
    extent: int,
    capture_start: int,
    capture_limit: int,
) -> None:
    """`reference.route_` in one launch.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    step = (per_request, query_start_loc, positions, token_ids_of_step)
    counts = (num_requests, extent, capture_start, capture_limit)
    fixed = (token_map, program, select, *work, clauses, token_ids, token_sets)
    call = (num_requests + 1, fixed, step + counts)
    room = min(token_map.shape[-1], select.shape[-1], work[0].shape[-1])
    if extent <= room and _ROUTE.again(*call):
        return
    maps = {"token_map": token_map, "select": select}
    lists = {"per_request": per_request, "query_start_loc": query_start_loc}
    more = {"positions": positions, "token_ids_of_step": token_ids_of_step}
    sets = {"token_ids": token_ids, "token_sets": token_sets}
    for name, tensor in (maps | lists | more | sets).items():
        check_rows(name, tensor)
    if not clauses[0].is_contiguous():
        raise ValueError(f"clauses of a row must be contiguous: {clauses.stride()}")
    check_program(program)
    num_tables = program.shape[0]
    if token_map.shape[0] != num_tables:
        raise ValueError(f"{token_map.shape[0]} maps for {num_tables} tables")
    state = work_of(0, work)
    if extent > room:
        raise ValueError(f"extent {extent} is more than the {room} maps")
    _ROUTE.launch(
        *call,
        token_map,
        program,
        select,
        state,
        per_request,
        query_start_loc,
        positions,
        token_ids_of_step,
        clauses,
        token_ids,
        token_sets,
        num_requests,
        extent,
        capture_start,
        capture_limit,
        per_request.stride(0),
        clauses.stride(0),
        token_ids.stride(0),
        token_sets.stride(0),
        token_sets.shape[1],
        state.score.stride(0),
        token_map.stride(0),
        *program.stride()[:2],
        num_tables,
        TABLES=block_of(num_tables),
        MAP_TABLES=MAP_TABLES,
        MAP_BLOCK=MAP_TOKENS,
        BLOCK=ROUTE_BLOCK,
        num_warps=4,
    )


def collect_(
    work: list[Tensor],
    select: Tensor,
    reads: Tensor,
    per_request: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_requests: int,
) -> None:
    """`reference.collect_` in one launch.

    Raises:
        ValueError: a layout that the kernel cannot read.
    """
    step = (per_request, query_start_loc, positions)
    call = (num_requests, (select, *work, reads), step)
    if num_requests and _COLLECT.again(*call):
        return
    maps = {"select": select, "reads": reads, "per_request": per_request}
    lists = {"query_start_loc": query_start_loc, "positions": positions}
    for name, tensor in (maps | lists).items():
        check_rows(name, tensor)
    state = work_of(0, work)
    if num_requests == 0:
        return
    _COLLECT.launch(
        *call,
        state,
        select,
        reads,
        per_request,
        query_start_loc,
        positions,
        reads.stride(0),
        per_request.stride(0),
        state.score.stride(0),
        MAX_SCORES=state.score.shape[1],
        BLOCK=COLLECT_BLOCK,
        num_warps=4,
    )
