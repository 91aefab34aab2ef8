"""A lowered request: the clauses and table rows that the ops read."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import attrgetter, or_
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from eyesplice.fx_passes.sites import Site, Submodule, Table
from eyesplice.ops.acting import acting_clauses
from eyesplice.ops.families import FAMILY_OF
from eyesplice.ops.layout import (
    CLAUSE_WORDS,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    PRESERVE_NORM,
    WORDS,
    ClauseKind,
    Family,
    Function,
    Header,
    Opcode,
    Reduce,
    Scope,
    Stage,
    Word,
)
from eyesplice.ops.simple import adds, simple

FLOAT32_LIMIT: Final = 3.4e38
"""Largest magnitude of a number that goes into a table; also "no bound" of a clamp."""

WRITE_OPCODES: Final = (*range(Opcode.ADD, Opcode.ROUTER + 1), Opcode.CUSTOM)


@dataclass(frozen=True, slots=True)
class Clause:
    """One bit of a token's `select` word; see `ClauseKind` for the fields.

    Masks are held unsigned, in 0..2**32 - 1. A TOKEN_LIST names a slice of the program's
    token ids, a TOKEN_SET a row of `token_sets`.
    """

    kind: ClauseKind
    a: int = 0
    b: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a program table, its fields named as in `Word`.

    `function` is a member of the enumeration that the opcode asks for. `u` and `v` are
    bank rows, or what the opcode takes there. `clause_mask` and `bit` are unsigned, in
    0..2**32 - 1.
    """

    stage: Stage
    opcode: Opcode
    function: int = Function.IDENTITY
    u: int = 0
    v: int = 0
    clause_mask: int = 0
    gain: float = 0.0
    in_scale: float = 1.0
    bias: float = 0.0
    lo: float = 0.0
    hi: float = 0.0
    rank: int = 0
    bias_row: int = 0
    flags: int = 0
    counter: int = 0
    slot: int = 0
    bit: int = 0

    @property
    def family(self) -> Family:
        """The op families that must be compiled in for this entry."""
        needed = FAMILY_OF[self.opcode]
        return needed | Family.PRESERVE_NORM if self.flags & PRESERVE_NORM else needed


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionInfo:
    """One function of a program, as answers name it.

    Attributes:
        name: `app/name`, `app/index`, the client's own name, or `writes/0`, `reads/0`.
        kind: what it is.
        kernel: its kernel.
        layers: ascending decoder layers.
        submodule: the value of each layer.
        app: the app that it is of, None for the request's own.
        gated: whether its entries count how often its gate let it act.
        reduce: what the answer makes of a read's scores.
        over: the tokens that it is made of.
        top_k: experts per token of a router read, else 0.
    """

    name: str
    kind: Literal["read", "write"]
    kernel: str
    layers: tuple[int, ...]
    submodule: Submodule
    app: str | None = None
    gated: bool = False
    reduce: Reduce = Reduce.NONE
    over: Scope = Scope.NONE
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class ScoreInfo:
    """One score; its index in the program is its score slot.

    Attributes:
        function: index of the read that makes it.
        layer: where.
        feature: which of the read's features, None for a read of one score.
        scope: the tokens over which a gate wants it reduced; NONE if no gate does.
    """

    function: int
    layer: int
    feature: int | None
    scope: Scope


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """One captured site; its index in the program is `u` of its CAPTURE entry.

    Attributes:
        function: index of the read that wants it.
        site: where.
    """

    function: int
    site: Site


@dataclass(frozen=True, slots=True)
class Program:
    """What one request does to the model, ready to be packed into a row.

    Attributes:
        digest: content hash of the request, its vectors and its token sets, "sha256:...".
        clauses: conditions, each after the ones its mask names. Gates own the bits of
            `select` that follow.
        tables: entries of the non-empty tables, in the order in which they run.
        functions: its reads and writes; `counter` of an entry is 1 + an index here.
        scores: its scores, by slot.
        captures: its captured sites.
        latched: bits of `select` that are latches.
        token_ids: what TOKEN_LIST clauses name, at most MAX_TOKEN_IDS.
        needs_every_token: whether tokens of a cached prefix must be computed again,
            because something is read from them or remembered about them.
    """

    digest: str
    clauses: tuple[Clause, ...]
    tables: Mapping[Table, tuple[Entry, ...]]
    functions: tuple[FunctionInfo, ...] = ()
    scores: tuple[ScoreInfo, ...] = ()
    captures: tuple[CaptureInfo, ...] = ()
    latched: int = 0
    token_ids: tuple[int, ...] = ()
    needs_every_token: bool = False

    @property
    def depends_on_prompt_length(self) -> bool:
        """Whether a token's part in the program depends on where its prompt ends.

        Then equal prefixes of prompts of unequal lengths are not computed alike.
        """
        relative = (ClauseKind.PROMPT, ClauseKind.GENERATED, ClauseKind.LAST)
        return any(c.kind in relative or c.flags for c in self.clauses) or any(
            entry.opcode is Opcode.COMPARE
            and entry.u != Reduce.NONE
            and entry.v in (Scope.PROMPT, Scope.GENERATED)
            for entries in self.tables.values()
            for entry in entries
        )

    @property
    def families(self) -> Family:
        """The op families that must be compiled in."""
        needed = (e.family for entries in self.tables.values() for e in entries)
        return reduce(or_, needed, Family(0))

    @property
    def changes_kv(self) -> bool:
        """Whether it writes anything, so that its KV cache is its own."""
        return any(
            entry.opcode in WRITE_OPCODES
            for entries in self.tables.values()
            for entry in entries
        )


def pack(entries: Sequence[Entry], max_entries: int) -> Tensor:
    """The row of a program of one table: its header, then the entries sorted by stage.

    Returns:
        int32 `[1 + max_entries, WORDS]`, on the CPU; unused slots are zero.
    """
    return pack_tables([entries], max_entries)[0]


def pack_tables(tables: Iterable[Sequence[Entry]], max_entries: int) -> Tensor:
    """The rows of a program in all its tables, as `pack` makes them.

    Args:
        tables: entries of every table that is not empty: gates in one decide where
            others act. Empty ones may be among them.
        max_entries: a table's.

    Returns:
        int32 `[tables, 1 + max_entries, WORDS]`, on the CPU.
    """
    tables = list(tables)
    row_bytes = (1 + max_entries) * _ENTRY.size
    packed = bytearray()
    rows = zip(tables, acting_clauses(tables), strict=True)
    for number, (entries, clauses) in enumerate(rows, start=1):
        assert len(entries) <= max_entries, (len(entries), max_entries)
        if entries:
            packed += _header(entries, clauses)
        for entry in sorted(entries, key=attrgetter("stage")):
            packed += _ENTRY.pack(*_FIELDS(entry))
        packed += bytes(number * row_bytes - len(packed))
    words = np.frombuffer(packed, dtype=np.int32)
    return torch.from_numpy(words).view(-1, 1 + max_entries, WORDS)


_FIELDS: Final = attrgetter(*(word.name.lower() for word in Word))
_ENTRY: Final = struct.Struct("=5I5f6I")
"""The fields in the order of `Word`: `FLOAT_WORDS` are fp32, masks unsigned."""
_HEADER: Final = struct.Struct(f"={WORDS}i")
_WRITES: Final = frozenset(WRITE_OPCODES)


def _header(entries: Sequence[Entry], clauses: int) -> bytes:
    counts, writes = [0] * len(Stage), [0] * len(Stage)
    for entry in entries:
        counts[entry.stage] += 1
        writes[entry.stage] |= entry.opcode in _WRITES
    unused = [0] * (WORDS - len(Header))
    kinds = simple(entries), adds(entries), _int32(clauses)
    return _HEADER.pack(*accumulate(counts), *writes, *kinds, *unused)


def pack_clauses(clauses: Sequence[Clause]) -> Tensor:
    """The clauses of one program: int32 `[MAX_CLAUSES, CLAUSE_WORDS]`, on the CPU."""
    assert len(clauses) <= MAX_CLAUSES, len(clauses)
    packed = torch.zeros(MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
    for clause, words in zip(clauses, packed, strict=False):
        fields = (clause.kind, _int32(clause.a), clause.b, clause.flags)
        words[: len(fields)] = torch.tensor(fields, dtype=torch.int32)
    return packed


def pack_reads(program: Program, max_scores: int) -> Tensor:
    """The program's row of `reads`: int32 `[max_scores + 1]`, on the CPU.

    The `Scope` of each score, and last the bits that are latches.
    """
    assert len(program.scores) <= max_scores, (len(program.scores), max_scores)
    packed = torch.zeros(max_scores + 1, dtype=torch.int32)
    for slot, score in enumerate(program.scores):
        packed[slot] = int(score.scope)
    packed[max_scores] = _int32(program.latched)
    return packed


def pack_token_ids(program: Program) -> Tensor:
    """The program's row of `token_ids`: int32 `[MAX_TOKEN_IDS]`, on the CPU."""
    assert len(program.token_ids) <= MAX_TOKEN_IDS, len(program.token_ids)
    packed = torch.zeros(MAX_TOKEN_IDS, dtype=torch.int32)
    packed[: len(program.token_ids)] = torch.tensor(
        program.token_ids, dtype=torch.int32
    )
    return packed


def _int32(bits: int) -> int:
    """The int32 that holds these 32 bits; numbers that are int32 stay as they are."""
    return bits - 2**32 if bits >= 2**31 else bits
