"""The `gate` language: what scores let a function act.

    score >= number  (also < <= >, and the number first)  and  or  not  ( )
    latch(gate)      once true, true for the rest of the request

with a score: a read's name, `kernel(layer=N)`, `name(layer=N)`; `[i]` behind it for
feature i of an sae read; `.mean`, `.max` or `.last` for its reduction. A name that is no
Python name stands in quotes. Python's own parser reads it and a whitelist of its node
types is accepted; nothing is ever evaluated.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from eyesplice.fx_passes.marked import Source
from eyesplice.fx_passes.plain import number
from eyesplice.fx_passes.program import FLOAT32_LIMIT
from eyesplice.ops.layout import Comparison, Reduce

MAX_LATCHES: Final = 2
"""Latches around one score: one, and one inside it."""

_ALLOWED: Final = (
    "comparisons (< <= > >=) of a score with a number, joined by and, or, not and "
    "parentheses, and latch(gate). A score is a read's name, kernel(layer=N) or "
    "name(layer=N), with .mean, .max or .last for its reduction"
)
_REDUCTIONS: Final = {"last": Reduce.LAST, "mean": Reduce.MEAN, "max": Reduce.MAX}
_OPERATORS: Final[dict[type[ast.cmpop], Comparison]] = {
    ast.Lt: Comparison.LESS,
    ast.LtE: Comparison.LESS_EQUAL,
    ast.Gt: Comparison.GREATER,
    ast.GtE: Comparison.GREATER_EQUAL,
}
_FLIPPED: Final = {
    Comparison.LESS: Comparison.GREATER,
    Comparison.LESS_EQUAL: Comparison.GREATER_EQUAL,
    Comparison.GREATER: Comparison.LESS,
    Comparison.GREATER_EQUAL: Comparison.LESS_EQUAL,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A score as a gate names it.

    Attributes:
        name: of a read, or of its kernel if `layer` is given.
        layer: of the model, from the end if negative; None where the read has one.
        feature: index of an sae read's row.
        span: first column and the column behind the name and its layer.
    """

    name: str
    layer: int | None
    feature: int | None
    span: tuple[int, int] = field(default=(0, 0), compare=False)


@dataclass(frozen=True, slots=True, order=True)
class ScoreKey:
    """One score of a request.

    Attributes:
        read: index of the read among the request's functions.
        layer: where it reads.
        feature: index of an sae read's row, else 0.
    """

    read: int
    layer: int
    feature: int


@dataclass(frozen=True, slots=True, order=True)
class Compare:
    """Whether a score, or its reduction, is (less, ...) than the value."""

    score: ScoreKey
    reduce: Reduce
    comparison: Comparison
    value: float


@dataclass(frozen=True, slots=True)
class Constant:
    """A gate that is always open, or never."""

    value: bool


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite."""

    part: "Gate"


@dataclass(frozen=True, slots=True)
class And:
    """All parts."""

    parts: tuple["Gate", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Any part."""

    parts: tuple["Gate", ...]


@dataclass(frozen=True, slots=True)
class Latch:
    """True from the first token on which the part was true."""

    part: "Gate"


Gate: TypeAlias = Compare | Constant | Not | And | Or | Latch

Resolve: TypeAlias = Callable[[Reference], ScoreKey]
"""Finds the score that a reference names; a `LookupError` says why there is none."""


def check_gate(text: str) -> None:
    """Refuse what is no gate whatever the reads are.

    Raises:
        SpecError: too long, malformed, or something else than the language has; the
            message marks the place.
    """
    parse_gate(text, lambda reference: ScoreKey(0, 0, 0))


def parse_gate(text: str, resolve: Resolve) -> Gate:
    """The gate that a `gate` string states, as its author wrote it.

    Raises:
        SpecError: as `check_gate`, or a score that is not there.
    """
    return _Parser(text, resolve).parse()


class _Parser:
    """One parse of a gate."""

    def __init__(self, text: str, resolve: Resolve) -> None:
        self.source = Source("gate", text, _ALLOWED)
        self.resolve = resolve

    def parse(self) -> Gate:
        text = self.source.text
        for column, character in enumerate(text):
            if character == "\\" or not character.isprintable():
                raise self.source.error(column, "unexpected character")
        return self._convert(self.source.parse(text), 0, 0)

    def _convert(self, node: ast.expr, depth: int, latches: int) -> Gate:
        self.source.check_depth(node, depth)
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = tuple(self._convert(v, depth + 1, latches) for v in values)
                return And(parts) if isinstance(op, ast.And) else Or(parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Not(self._convert(operand, depth + 1, latches))
            case ast.Compare():
                return self._compare(node)
            case ast.Call(func=ast.Name(id="latch"), args=[inner], keywords=[]):
                if latches == MAX_LATCHES:
                    raise self.source.error(
                        node, "a latch in a latch may hold no third one"
                    )
                return Latch(self._convert(inner, depth + 1, latches + 1))
            case ast.Call(func=ast.Name(id="latch")) | ast.Name(id="latch"):
                raise self.source.error(node, "needs a gate, as in (name >= 0)")
            case ast.Name() | ast.Call() | ast.Attribute() | ast.Subscript():
                raise self.source.error(node, "compare this with a number")
        raise self.source.error(node, "not a comparison of a score with a number")

    def _compare(self, node: ast.Compare) -> Gate:
        if len(node.ops) > 1:
            raise self.source.error(
                node.comparators[1], "one comparison at a time: join them with and"
            )
        comparison = _OPERATORS.get(type(node.ops[0]))
        left, right = node.left, node.comparators[0]
        if comparison is None:
            raise self.source.error(node, "compare with < <= > or >=")
        if _is_number(left) and not _is_number(right):
            left, right, comparison = right, left, _FLIPPED[comparison]
        reduce = Reduce.NONE
        if isinstance(left, ast.Attribute):
            if left.attr not in _REDUCTIONS:
                raise self.source.error(left, "only .mean, .max and .last")
            reduce, left = _REDUCTIONS[left.attr], left.value
        key = self._score(left)
        return Compare(key, reduce, comparison, self._number(right))

    def _score(self, node: ast.expr) -> ScoreKey:
        feature, base = None, node
        if isinstance(base, ast.Subscript):
            feature = _integer(base.slice)
            if feature is None or feature < 0:
                raise self.source.error(
                    base.slice, "expected a feature's index, as [0]"
                )
            base = base.value
        span, layer = (self.source.column(base), self.source.end(base)), None
        if isinstance(base, ast.Call):
            layer = self._layer(base)
            base = base.func
        match base:
            case ast.Name(id=name) | ast.Constant(value=str(name)):
                reference = Reference(name, layer, feature, span)
            case _:
                raise self.source.error(node, "not a score")
        try:
            return self.resolve(reference)
        except LookupError as error:
            raise self.source.error(node, str(error.args[0])) from None

    def _layer(self, node: ast.Call) -> int:
        match node:
            case ast.Call(args=[], keywords=[ast.keyword(arg="layer", value=value)]):
                if (layer := _integer(value)) is not None:
                    return layer
        raise self.source.error(node, "expected (layer=N)")

    def _number(self, node: ast.expr) -> float:
        value = _value(node)
        if value is None:
            raise self.source.error(node, "compare a score with a number")
        # Compared as it is: an int may be too large for a float.
        if not abs(value) <= FLOAT32_LIMIT:
            raise self.source.error(node, f"numbers go up to {FLOAT32_LIMIT:g}")
        return number(value)


def _is_number(node: ast.expr) -> bool:
    return _value(node) is not None


def _value(node: ast.expr) -> int | float | None:
    """The number that a literal with an optional sign states, None for others."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as inner):
            value = _value(inner)
            return None if value is None else -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant() as inner):
            return _value(inner)
        case ast.Constant(value=value) if not isinstance(value, bool):
            return value if isinstance(value, int | float) else None
    return None


def _integer(node: ast.expr) -> int | None:
    value: Any = _value(node)
    return value if isinstance(value, int) and abs(value) < 2**31 else None
