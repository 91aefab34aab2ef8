"""Programs that only add: the boundary kernel has ways of their own for them."""

from collections.abc import Sequence
from typing import Final, Protocol

from eyesplice.ops.layout import GENERAL, Function, Opcode, Stage

MAX_ADDS: Final = 7
"""Vectors that a program which only adds vectors may add at one boundary."""


class SomeEntry(Protocol):
    """What decides whether an entry is simple."""

    @property
    def opcode(self) -> int:
        """Its `Opcode`."""

    @property
    def stage(self) -> Stage:
        """The value that it acts on."""

    @property
    def function(self) -> int:
        """Its `Function`, if the opcode has one."""

    @property
    def flags(self) -> int:
        """Its flags, bits of FLAGS."""

    @property
    def counter(self) -> int:
        """1 + the function that counts it, 0 for none."""

    @property
    def u(self) -> int:
        """The bank row of its vector."""


def simple(entries: Sequence[SomeEntry]) -> int:
    """`Header.SIMPLE` of a row: the number of its entries, or GENERAL.

    Simple entries are ADD, and RANK1 with the identity, on h without a flag. Not ADD on
    x: where registers are short these rows take the general part, which adds to x before
    x is added to the stream, and a token must have the same bits in any batch.
    """
    only = all(
        entry.stage == Stage.STREAM
        and not entry.flags
        and (
            entry.opcode == Opcode.ADD
            or (entry.opcode == Opcode.RANK1 and entry.function == Function.IDENTITY)
        )
        for entry in entries
    )
    return len(entries) if only else GENERAL


def adds(entries: Sequence[SomeEntry]) -> int:
    """`Header.ADDS` of a row: how many vectors it adds, 0 if it does anything else.

    ADD on x or h, neither flagged nor counted, MAX_ADDS of them at most. Since h =
    stream + x, and x itself is then seen by nobody, all are run on h, in any batch.
    """
    only = all(
        entry.opcode == Opcode.ADD
        and entry.stage != Stage.NORMED
        and not (entry.flags or entry.counter)
        for entry in entries
    )
    return len(entries) if only and len(entries) <= MAX_ADDS else 0
