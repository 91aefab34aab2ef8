"""The tables that belong to a program table, found by it.

A compiled graph hands every tensor that an op takes through each of its pieces, in Python
and at every step that no CUDA graph holds whole. So an op of the graph takes one tensor,
its program table, and finds the others here, with the launches that were kept for them.

The layers of a model take their turns, each once a step, and by the next step what only
one of them looks at has left the processor's caches. So launches are kept once for all
tables that differ by addresses alone, and what is one table's own is as little as can be.
"""

import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

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
        addresses: of the map, of `select` and of the program table, the arguments of
            a kept launch that are another table's at another place.
        launches: kept launches of kernels on these tables, by all that decides them.
    """

    token_map: Tensor
    select: Tensor
    bank: Tensor
    work: list[Tensor]
    room: int = field(init=False)
    max_tokens: int = field(init=False)
    addresses: tuple[int, int, int] = field(init=False, default=(0, 0, 0))
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

    def likeness(self, program: Tensor) -> Hashable:
        """Equal for tables whose launches differ in `addresses` alone."""
        return (
            tuple(address % ALIGNED == 0 for address in self.addresses),
            *(_layout(tensor) for tensor in (self.token_map, program)),
            *(
                (tensor.data_ptr(), *_layout(tensor))
                for tensor in (self.select, self.bank, *self.work)
            ),
        )


def _layout(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


ALIGNED: Final = 16
"""Bytes; Triton compiles a kernel of its own for pointers that are not."""

FOUND: Final[dict[int, SiteTables]] = {}
"""Tables by the address of their program table: what `tables_of` looks in."""


def open_tables(owner: object, sites: Iterable[tuple[Tensor, SiteTables]]) -> None:
    """Let ops find tables by their programs, for as long as `owner` lives.

    Args:
        owner: whatever holds the tables; it must take weak references.
        sites: program tables, none of them empty, each with what belongs to it. Ops are
            called with these, and with no other view of one.

    Raises:
        ValueError: what belongs to one program given for another as well.
    """
    opened: dict[int, SiteTables] = {}
    launches: dict[Hashable, dict[Hashable, Any]] = {}
    for program, tables in sites:
        address = program.data_ptr()
        if any(tables is other for other in opened.values()):
            raise ValueError(
                f"program: the tables of the one at {address:#x} belong to another one "
                "as well; make SiteTables for each"
            )
        opened[address] = tables
        maps = tables.token_map.data_ptr(), tables.select.data_ptr()
        tables.addresses = (*maps, address)
        # Opened before, they may hold launches of then.
        tables.launches = launches.setdefault(tables.likeness(program), {})
    FOUND.update(opened)
    weakref.finalize(owner, _close, opened).atexit = False


def _close(opened: dict[int, SiteTables]) -> None:
    for address, tables in opened.items():
        # Another engine's tables may lie there by now.
        if FOUND.get(address) is tables:
            del FOUND[address]


def tables_of(program: Tensor) -> SiteTables:
    """What belongs to a program table.

    Raises:
        ValueError: nobody opened it, or its owner has gone.
    """
    found = FOUND.get(program.data_ptr())
    if found is None:
        raise ValueError(
            f"program: a table {tuple(program.shape)} at {program.data_ptr():#x} that "
            "belongs to no engine of this process; a copy of a table is none"
        )
    return found
