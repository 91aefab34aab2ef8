"""The `when` language: which tokens of a request a write acts on.

    all  prompt  generated  last_token  positions(a:b)  and  or  not  ( )

Python's own parser reads it and a whitelist of its node types is accepted; nothing is
ever evaluated.
"""

import ast
import re
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import did_you_mean, printable
from eyesplice.fx_passes.program import Clause
from eyesplice.ops.layout import (
    INT32_MAX,
    MAX_CLAUSES,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
)

MAX_LENGTH: Final = 2000
MAX_DEPTH: Final = 32

_NAMES: Final = {
    "all": Clause(ClauseKind.ALL),
    "prompt": Clause(ClauseKind.PROMPT),
    "generated": Clause(ClauseKind.GENERATED),
    "last_token": Clause(ClauseKind.LAST),
}
_ALLOWED: Final = (
    "all, prompt, generated, last_token and positions(a:b), joined by and, or, not and "
    "parentheses"
)
_UNAVAILABLE: Final = re.compile(r"\b(?:token_in|after)\b")
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_ ():+-]")
_POSITIONS: Final = re.compile(r"\bpositions *\(([^()]*)\)")
_INTEGER: Final = r" *([+-]? *[0-9]+)? *"
_RANGE: Final = re.compile(f"{_INTEGER}(?:(:){_INTEGER})?")


@dataclass(frozen=True, slots=True)
class Combination:
    """Conditions joined by AND, OR or NOR."""

    kind: ClauseKind
    parts: tuple["Condition", ...]


Condition: TypeAlias = Clause | Combination


def normalise(text: str) -> str:
    """The condition with single spaces, which is how it is stored and pointed at."""
    return " ".join(text.split())


def parse_condition(text: str) -> Condition:
    """The condition that a `when` string states.

    Raises:
        SpecError: too long, malformed, or something else than the language has; the
            message marks the place.
    """
    if len(text) > MAX_LENGTH:
        raise SpecError(
            "when",
            text,
            f"at most {MAX_LENGTH} characters",
            "write a shorter condition",
        )
    source = normalise(text)
    if found := _UNAVAILABLE.search(source):
        raise _marked(source, found.start(), "token conditions are not in this version")
    if found := _FOREIGN.search(source):
        raise _marked(source, found.start(), "unexpected character")
    return _Parser(source).parse()


@dataclass
class ClauseBuilder:
    """The clauses of one program, each written once."""

    clauses: list[Clause] = field(default_factory=list)

    def add(self, text: str) -> int:
        """Index of the clause that is true where the condition `text` is.

        Raises:
            SpecError: as `parse_condition`, or more than MAX_CLAUSES clauses.
        """
        try:
            return self._index(parse_condition(text))
        except _TooManyClauses:
            raise SpecError(
                "when",
                text,
                f"at most {MAX_CLAUSES} different conditions in one request, parts of "
                "combined ones counted",
                "use fewer or simpler conditions",
            ) from None

    def _index(self, condition: Condition) -> int:
        if isinstance(condition, Clause):
            return self._intern(condition)
        parts = {self._index(part) for part in condition.parts}
        if len(parts) == 1:
            (part,) = parts
            if condition.kind is not ClauseKind.NOR:
                return part
            inner = self.clauses[part]
            if inner.kind is ClauseKind.NOR and inner.a.bit_count() == 1:
                return inner.a.bit_length() - 1
        return self._intern(Clause(condition.kind, sum(1 << part for part in parts)))

    def _intern(self, clause: Clause) -> int:
        if clause not in self.clauses:
            if len(self.clauses) == MAX_CLAUSES:
                raise _TooManyClauses
            self.clauses.append(clause)
        return self.clauses.index(clause)


class _TooManyClauses(Exception):
    """The program's clause list is full."""


class _Parser:
    """One parse of a normalised condition; columns index `source`."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.ranges: dict[int, Clause] = {}

    def parse(self) -> Condition:
        # `positions(a:b)` is not Python: leave its name, padded to the same length so
        # that the parser's columns are those of `source`, and keep its range aside.
        python = _POSITIONS.sub(self._take_range, self.source)
        try:
            tree = ast.parse(python, mode="eval")
        except SyntaxError as error:
            end = len(self.source)
            column = min((error.offset or end + 1) - 1, end)
            raise _marked(self.source, column, "cannot be read here") from None
        except (RecursionError, MemoryError, ValueError):
            raise _marked(self.source, 0, "too deeply nested") from None
        return self._convert(tree.body, 0)

    def _take_range(self, found: re.Match[str]) -> str:
        numbers = _RANGE.fullmatch(found[1])
        if not numbers or not (numbers[1] or numbers[2]):
            raise _marked(
                self.source, found.start(1), "expected whole numbers a:b, or one"
            )
        start, colon, stop = numbers.groups()
        a = self._number(start, found.start(1))
        b = self._number(stop, found.start(1))
        self.ranges[found.start()] = _range(a, b) if colon else _single(a or 0)
        return "positions".ljust(len(found[0]))

    def _number(self, digits: str | None, column: int) -> int | None:
        if digits is None:
            return None
        value = int(digits.replace(" ", ""))
        if abs(value) > INT32_MAX:
            raise _marked(self.source, column, f"positions go up to {INT32_MAX}")
        return value

    def _convert(self, node: ast.expr, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise _marked(
                self.source, node.col_offset, f"nested more than {MAX_DEPTH} levels"
            )
        match node:
            case ast.Name(id="positions"):
                if node.col_offset not in self.ranges:
                    raise _marked(
                        self.source, node.col_offset, "needs positions, as in (a:b)"
                    )
                return self.ranges[node.col_offset]
            case ast.Name(id=name):
                return self._named(name, node.col_offset)
            case ast.BoolOp(op=op, values=values):
                kind = ClauseKind.AND if isinstance(op, ast.And) else ClauseKind.OR
                parts = tuple(self._convert(value, depth + 1) for value in values)
                return Combination(kind, parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Combination(ClauseKind.NOR, (self._convert(operand, depth + 1),))
        raise _marked(self.source, node.col_offset, "not a condition")

    def _named(self, name: str, column: int) -> Clause:
        if name not in _NAMES:
            near = did_you_mean(name, (*_NAMES, "positions"))
            hint = f", did you mean {near}?" if near else ""
            raise _marked(self.source, column, f"unknown name{hint}")
        return _NAMES[name]


def _range(a: int | None, b: int | None) -> Clause:
    """Positions from `a` up to, not including, `b`; negative from the prompt's end."""
    start, stop = a or 0, INT32_MAX if b is None else b
    flags = RANGE_START_FROM_PROMPT_END if start < 0 else 0
    flags |= RANGE_STOP_FROM_PROMPT_END if stop < 0 else 0
    return Clause(ClauseKind.RANGE, start, stop, flags)


def _single(position: int) -> Clause:
    """The one position, negative from the prompt's end."""
    flags = 0
    if position < 0:
        flags = RANGE_START_FROM_PROMPT_END | RANGE_STOP_FROM_PROMPT_END
    return Clause(ClauseKind.RANGE, position, min(position + 1, INT32_MAX), flags)


def _marked(source: str, column: int, why: str) -> SpecError:
    """The error that marks a column of the source."""
    first = max(0, column - 60)
    line = printable(source[first : column + 60])
    mark = " " * (column - first) + "^"
    return SpecError(
        "when", source, _ALLOWED, f"correct the marked place:\n  {line}\n  {mark} {why}"
    )
