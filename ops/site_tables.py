"""The tables that belong to a program table, found by it.

A compiled graph hands every tensor that an op takes through each of its pieces, in Python
and at every step that no CUDA graph holds whole. So an op of the graph takes one tensor,
its program table, and finds the others here, with the launches that were kept for them.
"""

import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class SiteTables:
    """What the ops at one place take besides their values and their program table.

    Attributes:
        token_map: int32 `[tokens]`, the words of this table's tokens.
        select: int32 `[tokens]`, true clauses of each token.
        bank: `[rows, width]`, model dtype.
        work: the tensors of `layout.WORK`.
        room: tokens that both maps have room for.
        max_tokens: of the largest step, the map's.
        launches: kept launches of kernels on these tables, by all that decides them.
    """

    token_map: Tensor
    select: Tensor
    bank: Tensor
    work: list[Tensor]
    room: int = field(init=False)
    max_tokens: int = field(init=False)
    launches: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Count the room once."""
        self.max_tokens = self.token_map.numel()
        self.room = min(self.max_tokens, self.select.numel())

    def around(
        self, program: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """(token_map, select, program, bank, work), as `reference.boundary_` takes them."""
        return self.token_map, self.select, program, self.bank, self.work


_FOUND: dict[int, SiteTables] = {}


def open_tables(owner: object, sites: Iterable[tuple[Tensor, SiteTables]]) -> None:
    """Let ops find tables by their programs, for as long as `owner` lives.

    Args:
        owner: whatever holds the tables; it must take weak references.
        sites: program tables, none of them empty, each with what belongs to it.
    """
    opened = {program.data_ptr(): tables for program, tables in sites}
    _FOUND.update(opened)
    weakref.finalize(owner, _close, opened).atexit = False


def _close(opened: dict[int, SiteTables]) -> None:
    for address, tables in opened.items():
        # Another engine's tables may lie there by now.
        if _FOUND.get(address) is tables:
            del _FOUND[address]


def tables_of(program: Tensor) -> SiteTables:
    """What belongs to a program table.

    Raises:
        ValueError: nobody opened it, or its owner has gone.
    """
    found = _FOUND.get(program.data_ptr())
    if found is None:
        raise ValueError(
            f"program: a table {tuple(program.shape)} at {program.data_ptr():#x} that "
            "belongs to no engine of this process; a copy of a table is none"
        )
    return found
