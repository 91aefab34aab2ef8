"""How many rows a step can capture at most, from what the host knows before it runs."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from eyesplice.fx_passes.program import Clause, Program
from eyesplice.ops.layout import (
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
    Opcode,
)

_BEFORE: Final = 1
_LAST: Final = 2
_AFTER: Final = 4
_ANY: Final = _BEFORE | _LAST | _AFTER


class _Truth(NamedTuple):
    """The kinds of token at which a bit of `select` may be set, and may be clear."""

    true: int
    false: int

    def inverted(self) -> "_Truth":
        return _Truth(self.false, self.true)


_UNKNOWN: Final = _Truth(_ANY, _ANY)
_NEVER: Final = _Truth(0, _ANY)
_PLAIN: Final = {
    ClauseKind.FALSE: _NEVER,
    ClauseKind.ALL: _Truth(_ANY, 0),
    ClauseKind.PROMPT: _Truth(_BEFORE | _LAST, _AFTER),
    ClauseKind.GENERATED: _Truth(_AFTER, _BEFORE | _LAST),
    ClauseKind.LAST: _Truth(_LAST, _BEFORE | _AFTER),
}


@dataclass(frozen=True, slots=True)
class CaptureBounds:
    """The captures of a program that may hold a token, by where the token stands.

    Attributes:
        before: of the prompt, but not its last token.
        last: the prompt's last token.
        after: a generated token.
    """

    before: int
    last: int
    after: int

    @classmethod
    def of(cls, program: Program) -> "CaptureBounds":
        """Bounds that hold whatever the tokens are and the gates say."""
        if not program.captures:
            return cls(0, 0, 0)
        bits: dict[int, _Truth] = {}
        for index, clause in enumerate(program.clauses):
            bits[1 << index] = _clause(clause, bits)
        kinds = []
        for entries in program.tables.values():
            for entry in entries:
                if entry.opcode is Opcode.LOGIC:
                    kind = ClauseKind(entry.function)
                    bits[entry.bit] = _combined(kind, entry.u, bits)
                elif entry.opcode is Opcode.CAPTURE:
                    kinds.append(_any_of(entry.clause_mask, bits).true)
        return cls(*(sum(bool(k & one) for k in kinds) for one in (1, 2, 4)))


def _clause(clause: Clause, bits: dict[int, _Truth]) -> _Truth:
    if clause.kind in _PLAIN:
        return _PLAIN[clause.kind]
    if clause.kind is ClauseKind.RANGE:
        return _Truth(_range(clause), _ANY)
    return _combined(clause.kind, clause.a, bits)


def _range(clause: Clause) -> int:
    """Where a RANGE may be true: n - 1 is the prompt's last position."""
    kinds = _ANY
    if clause.flags & RANGE_STOP_FROM_PROMPT_END and clause.b <= 0:
        kinds &= _BEFORE | _LAST if clause.b == 0 else _BEFORE
    if clause.flags & RANGE_START_FROM_PROMPT_END and clause.a >= -1:
        kinds &= _LAST | _AFTER if clause.a == -1 else _AFTER
    return kinds


def _combined(kind: ClauseKind, mask: int, bits: dict[int, _Truth]) -> _Truth:
    if kind is ClauseKind.AND:
        true, false = _ANY, 0
        for bit in _each(mask, bits):
            true, false = true & bit.true, false | bit.false
        return _Truth(true, false)
    if kind is ClauseKind.OR:
        return _any_of(mask, bits)
    if kind is ClauseKind.NOR:
        return _any_of(mask, bits).inverted()
    return _UNKNOWN


def _any_of(mask: int, bits: dict[int, _Truth]) -> _Truth:
    true, false = 0, _ANY
    for bit in _each(mask, bits):
        true, false = true | bit.true, false & bit.false
    return _Truth(true, false)


def _each(mask: int, bits: dict[int, _Truth]) -> list[_Truth]:
    # What a comparison or a latch sets may be anything.
    singles = (1 << index for index in range(32))
    return [bits.get(single, _UNKNOWN) for single in singles if mask & single]
