"""The spliced ops as calls outside of a graph, for values that only a hook reaches."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyesplice.fx_passes.sites import Table
from eyesplice.integration.buffers import Buffers
from eyesplice.ops import contracts
from eyesplice.ops.layout import Stage


@dataclass(frozen=True, slots=True)
class TableOp:
    """One program table with what every op takes besides.

    Attributes:
        buffers: the engine's tables.
        table: whose entries run.
        families: the op families that are compiled in.
    """

    buffers: Buffers
    table: Table
    families: int

    @property
    def program(self) -> Tensor:
        """int32 `[rows, 1 + entries, WORDS]`."""
        return self.buffers.program[self.buffers.index[self.table]]

    @property
    def token_map(self) -> Tensor:
        """int32 `[tokens]`, the words of this table's tokens."""
        return self.buffers.token_map[self.buffers.index[self.table]]

    def arguments(self) -> tuple[Tensor, int]:
        """What both ops take after the values."""
        return self.program, self.families

    def inline(self, value: Tensor, stage: Stage) -> None:
        """Run one stage in place on a value `[tokens, ...]` with contiguous rows."""
        rows = value.view(value.shape[0], -1)
        contracts.inline_(rows, int(stage), *self.arguments())


def first_tensor(value: Any) -> Tensor:
    """A module's result, without what vLLM's linear layers return beside it."""
    found = value[0] if isinstance(value, tuple) else value
    assert isinstance(found, Tensor)
    return found
