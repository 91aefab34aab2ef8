"""A lowered request: the clauses and table rows that the ops read."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from eyesplice.fx_passes.sites import Table
from eyesplice.ops.layout import (
    CLAUSE_WORDS,
    MAX_CLAUSES,
    WORDS,
    ClauseKind,
    Function,
    Opcode,
    Stage,
    Word,
)

FLOAT32_LIMIT: Final = 3.4e38
"""Largest magnitude of a number that goes into a table; also "no bound" of a clamp."""


@dataclass(frozen=True, slots=True)
class Clause:
    """One bit of a token's `select` word; see `ClauseKind` for the fields.

    Masks are held unsigned, in 0..2**32 - 1.
    """

    kind: ClauseKind
    a: int = 0
    b: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a program table, its fields named as in `Word`.

    `u` and `v` are bank rows, `clause_mask` is unsigned, in 0..2**32 - 1.
    """

    stage: Stage
    opcode: Opcode
    u: int
    clause_mask: int
    gain: float
    function: Function = Function.IDENTITY
    v: int = 0
    in_scale: float = 1.0
    bias: float = 0.0
    lo: float = 0.0
    hi: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """What one request does to the model, ready to be packed into a row.

    Attributes:
        digest: content hash of the request and of its vectors, "sha256:...".
        clauses: conditions, each after the ones its mask names.
        tables: entries of the non-empty tables, sorted by stage.
    """

    digest: str
    clauses: tuple[Clause, ...]
    tables: Mapping[Table, tuple[Entry, ...]]

    @property
    def depends_on_prompt_length(self) -> bool:
        """Whether a token's part in the program depends on where its prompt ends.

        Then equal prefixes of prompts of unequal lengths are not computed alike.
        """
        relative = (ClauseKind.PROMPT, ClauseKind.GENERATED, ClauseKind.LAST)
        return any(c.kind in relative or c.flags for c in self.clauses)


def pack(entries: Sequence[Entry], max_entries: int) -> Tensor:
    """One row of a program table: its header, then the entries sorted by stage.

    Returns:
        int32 `[1 + max_entries, WORDS]`, on the CPU; unused slots are zero.
    """
    assert len(entries) <= max_entries, (len(entries), max_entries)
    packed = torch.zeros(1 + max_entries, WORDS, dtype=torch.int32)
    if entries:
        header = [sum(e.stage <= stage for e in entries) for stage in Stage]
        words = [_words(entry) for entry in sorted(entries, key=lambda e: e.stage)]
        packed[0, : len(header)] = torch.tensor(header, dtype=torch.int32)
        packed[1 : 1 + len(words), : len(Word)] = torch.tensor(words, dtype=torch.int32)
    return packed


def pack_clauses(clauses: Sequence[Clause]) -> Tensor:
    """The clauses of one program: int32 `[MAX_CLAUSES, CLAUSE_WORDS]`, on the CPU."""
    assert len(clauses) <= MAX_CLAUSES, len(clauses)
    packed = torch.zeros(MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
    for clause, words in zip(clauses, packed, strict=False):
        fields = (clause.kind, _int32(clause.a), clause.b, clause.flags)
        words[: len(fields)] = torch.tensor(fields, dtype=torch.int32)
    return packed


def _words(entry: Entry) -> list[int]:
    """The entry's fields in the order of `Word`, floats as their int32 bits."""
    fields = (getattr(entry, word.name.lower()) for word in Word)
    return [
        _float_bits(field) if word >= Word.GAIN else _int32(field)
        for word, field in zip(Word, fields, strict=True)
    ]


def _int32(bits: int) -> int:
    """The int32 that holds these 32 bits; numbers that are int32 stay as they are."""
    return bits - 2**32 if bits >= 2**31 else bits


def _float_bits(number: float) -> int:
    bits: int = struct.unpack("=i", struct.pack("=f", number))[0]
    return bits
