"""At which tokens a program can do anything at a boundary, by their clauses.

`route_` knows a token's clauses before the step, and only those. An entry that writes,
reads or captures does nothing where no bit of its `clause_mask` is set; one that counts
also counts where its `bit` is. A gate that finds its bit false leaves `select` as it is,
unless the bit was true before. So a row does nothing, and leaves no trace, at a token
where none of these bits is set or can come to be set in the step. Everything else that a
step keeps of a token, its slot, its clauses with those SEEN, and scores that are NaN,
`route_` writes whatever the token's word is; `collect_` looks at nothing else.

A gate's bit can be set only where what it looks at can hold: a comparison with the token's
own score where a READ of that score acts, an OR where any of its bits can be set, an AND
where one of them can, whichever is chosen. All others may hold anywhere: a NOR, and what
looks at other tokens. Hence a mask of clauses for every bit, one of which is true wherever
the bit is; such masks hold together, whatever the order in which the gates run: the first
bit to be set against its mask would need another one that was.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from eyesplice.ops.layout import ClauseKind, Opcode, Reduce

_ANYWHERE: Final = 1 << 32
"""Beside the bits of `select`: at any token."""

_SELECT: Final = _ANYWHERE - 1


class ActingEntry(Protocol):
    """What decides where an entry acts; fields as in `Word`, masks of either sign."""

    @property
    def opcode(self) -> int:
        """Its `Opcode`."""

    @property
    def function(self) -> int:
        """Its function, of a LOGIC entry a `ClauseKind`."""

    @property
    def u(self) -> int:
        """Of a gate: the `Reduce` or the bits that it looks at."""

    @property
    def clause_mask(self) -> int:
        """Where it acts, unless it is a gate."""

    @property
    def counter(self) -> int:
        """1 + the function that counts it, 0 for none."""

    @property
    def slot(self) -> int:
        """The score that it makes or looks at."""

    @property
    def bit(self) -> int:
        """The bit that a gate sets, and where else a counted entry counts."""


def acting_clauses(tables: Iterable[Sequence[ActingEntry]]) -> list[int]:
    """`Header.CLAUSES` of a program's row in each of its tables, unsigned.

    Args:
        tables: the entries of all its tables: gates of one decide about others.
    """
    rows = list(tables)
    entries = [entry for row in rows for entry in row]
    gates = [entry for entry in entries if _is_gate(entry)]
    possible = _possible(gates, entries) if gates else {}
    found = []
    for row in rows:
        clauses = 0
        for entry in row:
            gate = _is_gate(entry)
            if not gate:
                clauses |= entry.clause_mask
            if gate or entry.counter:
                clauses |= entry.bit
        clauses = _where(clauses & _SELECT, possible)
        found.append(0 if clauses & _ANYWHERE else clauses)
    return found


def _is_gate(entry: ActingEntry) -> bool:
    return Opcode.COMPARE <= entry.opcode <= Opcode.LATCH


def _possible(
    gates: Sequence[ActingEntry], entries: Iterable[ActingEntry]
) -> dict[int, int]:
    """By the bit of each gate: the clauses, one of which is true where it gets set."""
    reads: dict[int, int] = {}
    for entry in entries:
        if entry.opcode == Opcode.READ:
            mask = entry.clause_mask & _SELECT
            reads[entry.slot] = reads.get(entry.slot, 0) | mask
    possible = {gate.bit & _SELECT: 0 for gate in gates}
    before = None
    while possible != before:
        before = possible.copy()
        for gate in gates:
            possible[gate.bit & _SELECT] |= _cause(gate, reads, possible)
    return possible


def _cause(gate: ActingEntry, reads: dict[int, int], possible: dict[int, int]) -> int:
    """The clauses, one of which is true where the gate finds its bit true."""
    looks_at = gate.u & _SELECT
    if gate.opcode == Opcode.COMPARE and gate.u == Reduce.NONE:
        return _where(reads.get(gate.slot, 0), possible)
    if gate.opcode == Opcode.LOGIC and gate.function == ClauseKind.OR:
        return _where(looks_at, possible)
    if gate.opcode == Opcode.LOGIC and gate.function == ClauseKind.AND:
        bits = (1 << j for j in range(looks_at.bit_length()) if looks_at >> j & 1)
        wheres = (_where(bit, possible) for bit in bits)
        return min(wheres, key=_breadth, default=_ANYWHERE)
    return _ANYWHERE


def _where(mask: int, possible: dict[int, int]) -> int:
    """The clauses, one of which is true where any bit of the mask is or becomes true."""
    for bit, clauses in possible.items():
        if mask & bit:
            mask |= clauses
    return mask


def _breadth(clauses: int) -> tuple[bool, int]:
    return clauses >= _ANYWHERE, clauses.bit_count()
