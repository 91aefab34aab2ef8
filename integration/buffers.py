"""The device tensors that the spliced ops read: allocated once, never moved."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.sites import Table
from eyesplice.ops.layout import CLAUSE_WORDS, MAX_CLAUSES, WORDS


@dataclass(frozen=True, slots=True)
class Buffers:
    """Every table of one engine; see `eyesplice.ops.layout` for their contents.

    Attributes:
        row_of_token, select: int32 `[max_tokens]`.
        program: int32 `[tables, rows, 1 + max_entries, WORDS]`.
        bank: model dtype `[bank_rows, width]`.
        clauses: int32 `[rows, MAX_CLAUSES, CLAUSE_WORDS]`.
        index: place of each table in `program`.
    """

    row_of_token: Tensor
    select: Tensor
    program: Tensor
    bank: Tensor
    clauses: Tensor
    index: dict[Table, int]

    @classmethod
    def allocate(
        cls,
        plan: SplicePlan,
        *,
        max_tokens: int,
        max_requests: int,
        max_entries: int,
        bank_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Buffers":
        """Allocate idle tables: row 0 for every token, no entry in any program.

        Args:
            plan: decides how many program tables there are.
            max_tokens: tokens of the largest step, padding included.
            max_requests: requests of the largest batch; each may have its own program.
            max_entries: entries that a program may have in one table.
            bank_shape: (rows, width) of the bank.
            dtype: the model's dtype.
            device: where the model runs.
        """
        tables = plan.tables()
        rows = max_requests + 1

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            row_of_token=ints(max_tokens),
            select=ints(max_tokens),
            program=ints(len(tables), rows, 1 + max_entries, WORDS),
            bank=torch.zeros(tuple(bank_shape), dtype=dtype, device=device),
            clauses=ints(rows, MAX_CLAUSES, CLAUSE_WORDS),
            index={table: i for i, table in enumerate(tables)},
        )

    @property
    def rows(self) -> int:
        """Programs that can be live at once, the idle one included."""
        return self.program.shape[1]

    def num_bytes(self) -> int:
        """Device memory of all tables, in bytes."""
        tensors = (
            self.row_of_token,
            self.select,
            self.program,
            self.bank,
            self.clauses,
        )
        return sum(tensor.nbytes for tensor in tensors)
