"""One form for equal gates, so that they share the bits of `select`.

Comparisons are opaque: a token without a score fails `x >= 0` and `x < 0` alike, so one
is not the other's opposite.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

from eyesplice.fx_passes.gates import And, Compare, Constant, Gate, Latch, Not, Or

MAX_SIMPLIFIED: Final = 5
"""Comparisons and latches up to which sympy's minimal form is sought: at worst 12 ms for
5 of them, 50 ms for 6, 2 s for 8."""


@lru_cache(maxsize=4096)
def simplify(gate: Gate) -> Gate:
    """An equivalent gate without needless parts, equal for gates that mean the same.

    Gates of more than MAX_SIMPLIFIED different parts, and gates that are shorter as they
    are, only lose nesting, repeats and double negation.
    """
    flat = _gathered(_flattened(gate))
    atoms = sorted(set(_atoms(flat)), key=repr)
    if len(atoms) > MAX_SIMPLIFIED:
        return flat
    from sympy import Symbol
    from sympy.logic.boolalg import simplify_logic

    symbols = {atom: Symbol(f"x{i}") for i, atom in enumerate(atoms)}
    expression = simplify_logic(_to_sympy(flat, symbols), force=True)
    atom_of: dict[Any, Gate] = {symbol: atom for atom, symbol in symbols.items()}
    short = _gathered(_from_sympy(expression, atom_of))
    return short if _size(short) <= _size(flat) else flat


def _size(gate: Gate) -> int:
    """Combinations in a gate: what it takes besides its comparisons and latches."""
    match gate:
        case Not(part=Or(parts=parts)):
            return 1 + sum(map(_size, parts))
        case Not(part=part):
            return 1 + _size(part)
        case And(parts=parts) | Or(parts=parts):
            return 1 + sum(map(_size, parts))
    return 0


def _gathered(gate: Gate) -> Gate:
    """The gate with one opposite in place of several: one bit says that none is true."""
    match gate:
        case Not(part=part):
            inner = _gathered(part)
            return inner.part if isinstance(inner, Not) else Not(inner)
        case And(parts=parts):
            return _without_opposites(parts, And, Or)
        case Or(parts=parts):
            return _without_opposites(parts, Or, And)
    return gate


def _without_opposites(
    parts: tuple[Gate, ...], kind: type[And] | type[Or], dual: type[And] | type[Or]
) -> Gate:
    gathered = [_gathered(part) for part in parts]
    opposites = [part.part for part in gathered if isinstance(part, Not)]
    if len(opposites) > 1:
        rest = [part for part in gathered if not isinstance(part, Not)]
        opposite = Not(_ordered(opposites, dual))
        gathered = [*rest, opposite]
    return gathered[0] if len(gathered) == 1 else _ordered(gathered, kind)


def _ordered(parts: Iterable[Gate], kind: type[And] | type[Or]) -> And | Or:
    """The parts joined, parts of their own kind taken apart."""
    found: set[Gate] = set()
    for part in parts:
        found |= set(part.parts) if isinstance(part, kind) else {part}
    return kind(tuple(sorted(found, key=repr)))


def _atoms(gate: Gate) -> Iterator[Compare | Latch]:
    match gate:
        case Compare() | Latch():
            yield gate
        case Not(part=part):
            yield from _atoms(part)
        case And(parts=parts) | Or(parts=parts):
            for part in parts:
                yield from _atoms(part)


def _latch(gate: Latch) -> Gate:
    """The latch over its part's one form; latching twice or a constant does nothing."""
    part = simplify(gate.part)
    return part if isinstance(part, Latch | Constant) else Latch(part)


def _to_sympy(gate: Gate, symbols: dict[Any, Any]) -> Any:
    import sympy

    match gate:
        case Compare() | Latch():
            return symbols[gate]
        case Constant(value=value):
            return sympy.true if value else sympy.false
        case Not(part=part):
            return sympy.Not(_to_sympy(part, symbols))
        case And(parts=parts):
            return sympy.And(*(_to_sympy(part, symbols) for part in parts))
        case Or(parts=parts):
            return sympy.Or(*(_to_sympy(part, symbols) for part in parts))


def _from_sympy(expression: Any, atoms: dict[Any, Gate]) -> Gate:
    import sympy

    if expression in (sympy.true, sympy.false):
        return Constant(expression == sympy.true)
    if expression in atoms:
        return atoms[expression]
    parts = [_from_sympy(part, atoms) for part in expression.args]
    if isinstance(expression, sympy.Not):
        return Not(parts[0])
    ordered = tuple(sorted(parts, key=repr))
    return And(ordered) if isinstance(expression, sympy.And) else Or(ordered)


def _flattened(gate: Gate) -> Gate:
    """The gate with its own structure, tidied."""
    match gate:
        case Latch():
            return _latch(gate)
        case Not(part=part):
            inner = _flattened(part)
            if isinstance(inner, Not):
                return inner.part
            return (
                Constant(not inner.value) if isinstance(inner, Constant) else Not(inner)
            )
        case And():
            return _joined(gate, And, neutral=True)
        case Or():
            return _joined(gate, Or, neutral=False)
    return gate


def _joined(gate: And | Or, kind: type[And] | type[Or], neutral: bool) -> Gate:
    """The parts of an AND or OR without nesting, repeats and constants."""
    parts: set[Gate] = set()
    for part in map(_flattened, gate.parts):
        parts |= set(part.parts) if isinstance(part, kind) else {part}
    if Constant(not neutral) in parts:
        return Constant(not neutral)
    parts.discard(Constant(neutral))
    ordered = tuple(sorted(parts, key=repr))
    if len(ordered) < 2:
        return ordered[0] if ordered else Constant(neutral)
    return kind(ordered)
