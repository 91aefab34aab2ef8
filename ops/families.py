"""Which opcodes a deployment's families bring."""

from functools import lru_cache
from typing import Final

from eyesplice.ops.layout import Family, Opcode

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
}
"""The family that an opcode needs compiled in."""


@lru_cache
def opcodes_of(families: int) -> int:
    """A bit for each opcode, `1 << opcode`, whose family is among `families`."""
    return sum(1 << code for code, family in FAMILY_OF.items() if family & families)
