"""Where gates are evaluated: which bit of `select` each part has, and at which place.

A comparison with a token's own score goes right behind the read. A reduction or a latch
looks at other tokens of the step, which only a table that has run before has dealt
with: it goes to the front of the place where a function first uses it, in a later table
than what it looks at; inside a latch, to the first armed place that is late enough.
Combinations go where their last part is known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from eyesplice._errors import SpecError
from eyesplice.fx_passes.gates import (
    And,
    Compare,
    Constant,
    Gate,
    Latch,
    Not,
    Or,
    ScoreKey,
)
from eyesplice.fx_passes.order import Place, place_of
from eyesplice.fx_passes.sites import Site
from eyesplice.ops.layout import MAX_CLAUSES, ClauseKind, Reduce


@dataclass(frozen=True, slots=True)
class Logic:
    """Bits of `select` (a mask) joined by AND, OR or NOR."""

    kind: ClauseKind
    mask: int


@dataclass(frozen=True, slots=True)
class LatchBits:
    """A latch over the bits of a mask."""

    mask: int


Part: TypeAlias = Compare | Logic | LatchBits


class TooManyBits(Exception):
    """`select` has no bit left."""


@dataclass(frozen=True, slots=True)
class Gated:
    """A function as its gate sees it.

    Attributes:
        index: among the request's functions.
        site: the first of its sites in the forward pass.
        is_read: whether it is a read: it runs among the reads of its site.
        text: its gate, for errors.
    """

    index: int
    site: Site
    is_read: bool
    text: str


@dataclass
class Circuit:
    """The gates of one program, each part once.

    Attributes:
        site_of: the site that makes a score.
        armed: the armed places, in order.
        first_bit: clauses of the program; gates have the bits that follow.
        bits: the bit (a mask) of each part, inputs before what combines them.
        fronts: the place at whose front a part is evaluated, for reductions and
            latches.
    """

    site_of: Callable[[ScoreKey], Site]
    armed: Sequence[Place]
    first_bit: int
    bits: dict[Part, int] = field(default_factory=dict)
    fronts: dict[Part, Place] = field(default_factory=dict)

    def add(self, gate: Gate, function: Gated, when: int) -> int:
        """The bit that is set where the gate is open and the bits of `when` are.

        Args:
            gate: not a constant.
            function: whose gate it is.
            when: mask of bits that must be set as well, may be 0.

        Raises:
            SpecError: a score that is not known where the function acts.
            TooManyBits: `select` is full.
        """
        self._check(gate, function)
        place = place_of(function.site)
        if not when:
            return self._bit(gate, place)
        parts = gate.parts if isinstance(gate, And) else (gate,)
        masks = {self._bit(part, place) for part in parts}
        return self._intern(Logic(ClauseKind.AND, sum(masks) | when))

    def _bit(self, gate: Gate, due: Place | None) -> int:
        """The gate's bit; `due` is where it must be known, None for soon (in a latch)."""
        match gate:
            case Compare(reduce=Reduce.NONE):
                return self._intern(gate)
            case Compare():
                launch = place_of(self.site_of(gate.score)).launch
                return self._at_front(gate, due or self._after(launch))
            case Latch(part=part):
                bit = LatchBits(self._bit(part, None))
                return self._at_front(bit, due or self._after(self._launch(part)))
            case Not(part=Or(parts=parts)):
                return self._joined(ClauseKind.NOR, parts, due)
            case Not(part=part):
                return self._joined(ClauseKind.NOR, (part,), due)
            case And(parts=parts):
                return self._joined(ClauseKind.AND, parts, due)
            case Or(parts=parts):
                return self._joined(ClauseKind.OR, parts, due)
            case Constant():
                raise AssertionError("a constant has no bit")

    def _joined(
        self, kind: ClauseKind, parts: Iterable[Gate], due: Place | None
    ) -> int:
        masks = {self._bit(part, due) for part in parts}
        return self._intern(Logic(kind, sum(masks)))

    def _at_front(self, part: Part, place: Place) -> int:
        bit = self._intern(part)
        self.fronts[part] = min(place, self.fronts.get(part, place))
        return bit

    def _intern(self, part: Part) -> int:
        if part not in self.bits:
            number = self.first_bit + len(self.bits)
            if number >= MAX_CLAUSES:
                raise TooManyBits
            self.bits[part] = 1 << number
        return self.bits[part]

    def _check(self, gate: Gate, function: Gated) -> None:
        """Refuse a gate with a part that is not known where the function acts."""
        match gate:
            case Compare():
                self._check_compare(gate, function)
            case Latch(part=part):
                launch = self._launch_or_none(part)
                if launch is None or launch >= place_of(function.site).launch:
                    raise self._refusal(gate, function)
            case Not(part=part):
                self._check(part, function)
            case And(parts=parts) | Or(parts=parts):
                for part in parts:
                    self._check(part, function)

    def _check_compare(self, gate: Compare, function: Gated) -> None:
        read, acts = place_of(self.site_of(gate.score)), place_of(function.site)
        if gate.reduce is not Reduce.NONE:
            known = read.launch < acts.launch
        elif function.is_read and read == acts:
            known = gate.score.read < function.index
        else:
            known = read <= acts
        if not known:
            raise self._refusal(gate, function)

    def _refusal(self, gate: Compare | Latch, function: Gated) -> SpecError:
        sites = sorted(
            {self.site_of(compare.score) for compare in compares(gate)}, key=place_of
        )
        shown = ", ".join(map(str, sites))
        late = [s for s in sites if place_of(s) > place_of(function.site)]
        if late:
            allowed = f"reads of earlier sites than {function.site}, where it acts"
            remedy = f"read at an earlier site than {late[-1]}, or act at a later one"
        elif isinstance(gate, Compare) and gate.reduce is Reduce.NONE:
            allowed = f"reads declared before it, among those at {function.site}"
            remedy = "declare that read first"
        else:
            allowed = (
                f"the gate needs a read of an earlier boundary than {function.site}, "
                "where it acts: reductions and latches look at other tokens of the step"
            )
            remedy = (
                f"read at an earlier layer than {shown}, or act at a later one; a "
                "latch over a reduction, or over a latch, needs one more in between"
            )
        return SpecError("gate", f"{function.text} (reads at {shown})", allowed, remedy)

    def _launch(self, gate: Gate) -> tuple[int, int]:
        launch = self._launch_or_none(gate)
        assert launch is not None, "checked before"
        return launch

    def _launch_or_none(self, gate: Gate) -> tuple[int, int] | None:
        """The table in which a part of a latch is known, None if none is late enough."""
        match gate:
            case Compare():
                read = place_of(self.site_of(gate.score)).launch
                if gate.reduce is Reduce.NONE:
                    return read
                return self._launch_after(read)
            case Latch(part=part) | Not(part=part):
                inner = self._launch_or_none(part)
                if inner is None or isinstance(gate, Not):
                    return inner
                return self._launch_after(inner)
            case And(parts=parts) | Or(parts=parts):
                found = [self._launch_or_none(part) for part in parts]
                known = [launch for launch in found if launch is not None]
                return max(known) if len(known) == len(found) else None
        raise AssertionError("a constant is known everywhere")

    def _launch_after(self, launch: tuple[int, int]) -> tuple[int, int] | None:
        return next((p.launch for p in self.armed if p.launch > launch), None)

    def _after(self, launch: tuple[int, int]) -> Place:
        """The first armed place in a later table."""
        return next(place for place in self.armed if place.launch > launch)


def compares(gate: Gate) -> Iterable[Compare]:
    """Every comparison in a gate, those in latches too."""
    match gate:
        case Compare():
            yield gate
        case Latch(part=part) | Not(part=part):
            yield from compares(part)
        case And(parts=parts) | Or(parts=parts):
            for part in parts:
                yield from compares(part)


def reduced_scores(gates: Iterable[Gate]) -> set[ScoreKey]:
    """The scores that gates want reduced."""
    found = (compare for gate in gates for compare in compares(gate))
    return {compare.score for compare in found if compare.reduce is not Reduce.NONE}
