"""Programs that only add: the boundary kernel runs them on the idle tokens' path."""

from collections.abc import Sequence
from typing import Protocol

from eyesplice.ops.layout import GENERAL, Function, Opcode, Stage


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


def simple(entries: Sequence[SomeEntry]) -> int:
    """`Header.SIMPLE` of a row: the number of its entries, or GENERAL.

    Simple entries are ADD on x or h, and RANK1 with the identity on h, without a flag.
    Since h = stream + x, and x itself is then seen by nobody, all may be run on h.
    """
    return len(entries) if all(map(_adds, entries)) else GENERAL


def _adds(entry: SomeEntry) -> bool:
    if entry.flags or entry.stage == Stage.NORMED:
        return False
    if entry.opcode == Opcode.RANK1:
        return entry.stage == Stage.STREAM and entry.function == Function.IDENTITY
    return entry.opcode == Opcode.ADD
