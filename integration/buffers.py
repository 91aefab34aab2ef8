"""The device tensors that the spliced ops read: allocated once, never moved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Final

import torch
from torch import Tensor

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.sites import Table
from eyesplice.ops import layout
from eyesplice.ops.layout import WORK
from eyesplice.ops.site_tables import SiteTables, open_tables

BLOCK: Final = 8
"""int32 words of a block: what `words` is written in."""

_ALIGN: Final = 64
"""Every part of `words` and every map begin on a 256-byte boundary."""


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


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Buffers:
    """Every table of one engine, named and shaped as in `eyesplice.ops.layout`.

    The ops of the graph find all of them by a program table, as long as this lives.

    What the host writes before a step (programs, conditions, a new request's state) and
    what it reads after one (receipts, scores, the log of captures) are parts of one
    allocation, so that a single copy brings either.

    Attributes:
        words: int32 `[words]`, the allocation.
        first: the first word of each part, by its name here.
        token_map: int32 `[tables, tokens]`, the words of `eyesplice.ops.token_map`.
        index: place of each table in `program` and in `token_map`.
    """

    words: Tensor
    first: Mapping[str, int]
    token_map: Tensor
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
        """Allocate idle tables: nothing to do for any token, no entry in any program.

        Args:
            plan: decides how many program tables there are.
            sizes: what there is room for.
            dtype: the model's dtype.
            device: where the model runs.
        """
        tables = plan.tables()
        words, first, parts = _parts(sizes, len(tables), device)
        parts["score"].fill_(torch.nan)

        def zeros(*shape: int, of: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        buffers = cls(
            words=words,
            first=first,
            token_map=zeros(len(tables), _rounded_up(sizes.tokens))[:, : sizes.tokens],
            select=zeros(sizes.tokens),
            slot_of_token=zeros(sizes.tokens),
            bank=zeros(sizes.bank_rows, sizes.width, of=dtype),
            token_sets=zeros(sizes.token_sets, -(-sizes.vocab_size // 32)),
            capture=zeros(sizes.capture_rows, sizes.width, of=dtype),
            index={table: i for i, table in enumerate(tables)},
            **parts,
        )
        open_tables(buffers, buffers._sites())
        return buffers

    @property
    def work(self) -> list[Tensor]:
        """What the ops write for one another and for the host, in the order of WORK."""
        return [getattr(self, name) for name in WORK]

    def _sites(self) -> Iterator[tuple[Tensor, SiteTables]]:
        """Each program table, and what belongs to it."""
        for place in self.index.values():
            beside = (self.token_map[place], self.select, self.bank, self.work)
            yield self.program[place], SiteTables(*beside)

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.token_map.device

    @property
    def rows(self) -> int:
        """Programs that can be live at once, the idle one included."""
        return self.program.shape[1]

    def num_bytes(self) -> int:
        """Device memory of all tables, in bytes."""
        values = (
            getattr(self, field.name)
            for field in fields(self)
            if field.name not in self.first
        )
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _parts(
    sizes: BufferSizes, num_tables: int, device: torch.device
) -> tuple[Tensor, dict[str, int], dict[str, Tensor]]:
    """The common allocation, and what lies where in it.

    What is read after a step is last and in this order: receipts, positions and scores
    of the first tokens are then one range, which the log of captures precedes.
    """
    rows, scores = sizes.requests + 1, sizes.scores
    shapes: dict[str, tuple[int, ...]] = {
        "program": (num_tables, rows, 1 + sizes.entries, layout.WORDS),
        "clauses": (rows, layout.MAX_CLAUSES, layout.CLAUSE_WORDS),
        "token_ids": (rows, layout.MAX_TOKEN_IDS),
        "reads": (rows, scores + 1),
        "carry": (rows, scores, layout.CARRY_WORDS),
        "capture_log": (1 + sizes.capture_rows, layout.LOG_WORDS),
        "counts": (rows, 2, layout.MAX_FUNCTIONS),
        "slots": (rows, layout.SLOT_WORDS),
        "score": (sizes.tokens, scores),
    }
    dtypes = {"carry": torch.int64, "score": torch.float32}
    strides = {name: _strides(shape) for name, shape in shapes.items()}
    strides["reads"] = (-(-(scores + 1) // BLOCK) * BLOCK, 1)
    first, size = {}, 0
    for name, shape in shapes.items():
        first[name] = size
        item = dtypes.get(name, torch.int32).itemsize // 4
        size += _rounded_up(shape[0] * strides[name][0] * item)
    words = torch.zeros(size, dtype=torch.int32, device=device)
    storage = words.untyped_storage()
    parts = {}
    for name, shape in shapes.items():
        part = torch.empty(0, dtype=dtypes.get(name, torch.int32), device=device)
        offset = first[name] * words.itemsize // part.itemsize
        # Not views for autograd: the compiler sees them as tensors of their own.
        parts[name] = part.set_(storage, offset, shape, strides[name])
    return words, first, parts


def _rounded_up(words: int) -> int:
    return -(-words // _ALIGN) * _ALIGN


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[place + 1 :]) for place in range(len(shape)))
