"""The ops of the graph on a CPU: the reference, with the tables that are found."""

from torch import Tensor

from eyesplice.ops import reference
from eyesplice.ops.site_tables import tables_of


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
    """`reference.boundary_` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine.
    """
    return reference.boundary_(
        stream,
        branch,
        weight,
        weight_offset,
        eps,
        *tables_of(program).around(program),
        families,
        pending,
        defer,
    )


def inline_(value: Tensor, stage: int, program: Tensor, families: int) -> None:
    """`reference.inline_` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine.
    """
    reference.inline_(value, stage, *tables_of(program).around(program), families)


def custom_gain(value: Tensor, program: Tensor) -> Tensor:
    """`reference.custom_gain` with the tables that belong to `program`.

    Raises:
        ValueError: a program of no engine.
    """
    token_map, select, program, _, work = tables_of(program).around(program)
    return reference.custom_gain(value, token_map, select, program, work)
