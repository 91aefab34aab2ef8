"""The op families: their names, and which opcodes they bring."""

from functools import lru_cache
from typing import Final, Literal

from eyesplice.ops.layout import Family, Opcode

FamilyName = Literal[
    "add",
    "rank1",
    "affine",
    "replace",
    "mask",
    "router",
    "reads",
    "gates",
    "capture",
    "preserve_norm",
]

FAMILIES: Final[dict[FamilyName, Family]] = {
    "add": Family.ADD,
    "rank1": Family.RANK1,
    "affine": Family.AFFINE,
    "replace": Family.REPLACE,
    "mask": Family.MASK,
    "router": Family.ROUTER,
    "reads": Family.READ,
    "gates": Family.GATE,
    "capture": Family.CAPTURE,
    "preserve_norm": Family.PRESERVE_NORM,
}
"""What the configuration calls them."""

FAMILY_OF: Final = {
    Opcode.NONE: Family(0),
    Opcode.ADD: Family.ADD,
    Opcode.RANK1: Family.RANK1,
    Opcode.AFFINE: Family.AFFINE,
    Opcode.REPLACE: Family.REPLACE,
    Opcode.MASK: Family.MASK,
    Opcode.ROUTER: Family.ROUTER,
    Opcode.READ: Family.READ,
    Opcode.CAPTURE: Family.CAPTURE,
    Opcode.COMPARE: Family.GATE,
    Opcode.LOGIC: Family.GATE,
    Opcode.LATCH: Family.GATE,
    Opcode.CUSTOM: Family(0),
}
"""The family that an opcode needs compiled in."""


@lru_cache
def opcodes_of(families: int) -> int:
    """A bit for each opcode, `1 << opcode`, whose family is among `families`."""
    return sum(1 << code for code, family in FAMILY_OF.items() if family & families)
