"""The layout of the tables that the ops read: one place, shared by every writer.

A **program** is what one request does to the model. It occupies one **row** of every
table; row 0 is the empty program of idle and padding tokens.

    program  int32 [tables, rows, 1 + max_entries, WORDS]
             slot 0 of a row is its header, the rest are its entries, sorted by stage
    bank     model dtype [bank_rows, width]; row 0 is all zeros
    clauses  int32 [rows, MAX_CLAUSES, CLAUSE_WORDS]

There is one program table per residual-stream boundary (three stages: the branch `x`
that is added, the stream `h`, the normed `y`) and one per other armed value.
"""

from enum import IntEnum
from typing import Final

WORDS: Final = 16
"""int32 words per header or entry: 64 bytes, one aligned vector load."""

MAX_CLAUSES: Final = 32
"""Conditions per program: one bit of the int32 `select` word each."""

CLAUSE_WORDS: Final = 4


class Stage(IntEnum):
    """Which value of a boundary an entry acts on; entries are sorted by it."""

    BRANCH = 0
    STREAM = 1
    NORMED = 2


class Opcode(IntEnum):
    """What an entry does to the value `h` of one token, in fp32.

    ADD:   h += gain * bank[u]
    RANK1: h += gain * f(in_scale * (bank[v] . h) + bias) * bank[u]
    """

    NONE = 0
    ADD = 1
    RANK1 = 2


class Function(IntEnum):
    """The scalar function `f` of a RANK1 entry.

    CLIP is min(max(p, lo), hi); TOWARD_CLIP is CLIP(p) - p, the step that brings a
    projection into [lo, hi]; STEP is 1 where p >= 0.
    """

    IDENTITY = 0
    RELU = 1
    SIGMOID = 2
    STEP = 3
    CLIP = 4
    TOWARD_CLIP = 5


class Word(IntEnum):
    """Index of each field in an entry; the last ones are fp32 stored as int32 bits."""

    OPCODE = 0
    FUNCTION = 1
    U = 2
    V = 3
    CLAUSE_MASK = 4
    GAIN = 5
    IN_SCALE = 6
    BIAS = 7
    LO = 8
    HI = 9


class Header(IntEnum):
    """Index of each field in a row's header: where each stage's entries end.

    Entries of stage s occupy slots 1 + END[s-1] .. END[s], so `END_BRANCH` is also the
    number of branch entries, and `END_NORMED` the number of entries of the row.
    """

    END_BRANCH = 0
    END_STREAM = 1
    END_NORMED = 2


class ClauseKind(IntEnum):
    """How one bit of a token's `select` word is computed (words: kind, a, b, flags).

    With p the token's position and n its request's prompt length in tokens:

    FALSE      0
    ALL        1
    PROMPT     p < n
    GENERATED  p >= n
    LAST       p == n - 1
    RANGE      a' <= p < b', where a' = a + n if flags & 1 else a, b' likewise (flags & 2)
    AND        every bit of mask a is set (a holds bits of earlier clauses)
    OR         any bit of mask a is set
    NOR        no bit of mask a is set
    """

    FALSE = 0
    ALL = 1
    PROMPT = 2
    GENERATED = 3
    LAST = 4
    RANGE = 5
    AND = 6
    OR = 7
    NOR = 8


RANGE_START_FROM_PROMPT_END: Final = 1
RANGE_STOP_FROM_PROMPT_END: Final = 2
INT32_MAX: Final = 2**31 - 1
