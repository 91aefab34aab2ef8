"""The device tensors that the spliced ops read: allocated once, never moved."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.sites import Table
from eyesplice.ops import layout
from eyesplice.ops.layout import WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """What one engine's tables have room for.

    Attributes:
        tokens: tokens of the largest step, padding included.
        requests: requests of the largest batch; each may have its own program.
        entries: entries that a program may have in one table.
        scores: scores that a program may keep.
        bank_rows: rows of the vector bank.
        width: elements per row of the bank and of the captured rows.
        capture_rows: captured rows that wait to be copied to the host.
        token_sets: token sets that programs may name.
        vocab_size: token ids are 0 to vocab_size - 1.
    """

    tokens: int
    requests: int
    entries: int
    bank_rows: int
    width: int
    scores: int = 32
    capture_rows: int = 1024
    token_sets: int = 64
    vocab_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Every table of one engine, named and shaped as in `eyesplice.ops.layout`.

    Attributes:
        index: place of each table in `program`.
    """

    row_of_token: Tensor
    select: Tensor
    program: Tensor
    bank: Tensor
    clauses: Tensor
    token_ids: Tensor
    token_sets: Tensor
    reads: Tensor
    slot_of_token: Tensor
    slots: Tensor
    counts: Tensor
    score: Tensor
    carry: Tensor
    capture: Tensor
    capture_log: Tensor
    index: Mapping[Table, int]

    @classmethod
    def allocate(
        cls,
        plan: SplicePlan,
        sizes: BufferSizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Buffers":
        """Allocate idle tables: row 0 for every token, no entry in any program.

        Args:
            plan: decides how many program tables there are.
            sizes: what there is room for.
            dtype: the model's dtype.
            device: where the model runs.
        """
        tables = plan.tables()
        rows = sizes.requests + 1

        def zeros(*shape: int, of: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        return cls(
            row_of_token=zeros(sizes.tokens),
            select=zeros(sizes.tokens),
            program=zeros(len(tables), rows, 1 + sizes.entries, layout.WORDS),
            bank=zeros(sizes.bank_rows, sizes.width, of=dtype),
            clauses=zeros(rows, layout.MAX_CLAUSES, layout.CLAUSE_WORDS),
            token_ids=zeros(rows, layout.MAX_TOKEN_IDS),
            token_sets=zeros(sizes.token_sets, -(-sizes.vocab_size // 32)),
            reads=zeros(rows, sizes.scores + 1),
            slot_of_token=zeros(sizes.tokens),
            slots=zeros(rows, layout.SLOT_WORDS),
            counts=zeros(rows, 2, layout.MAX_FUNCTIONS),
            score=zeros(sizes.tokens, sizes.scores, of=torch.float32).fill_(torch.nan),
            carry=zeros(rows, sizes.scores, layout.CARRY_WORDS, of=torch.int64),
            capture=zeros(sizes.capture_rows, sizes.width, of=dtype),
            capture_log=zeros(1 + sizes.capture_rows, layout.LOG_WORDS),
            index={table: i for i, table in enumerate(tables)},
        )

    @property
    def work(self) -> list[Tensor]:
        """What the ops write for one another and for the host, in the order of WORK."""
        return [getattr(self, name) for name in WORK]

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.row_of_token.device

    @property
    def rows(self) -> int:
        """Programs that can be live at once, the idle one included."""
        return self.program.shape[1]

    def num_bytes(self) -> int:
        """Device memory of all tables, in bytes."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))
