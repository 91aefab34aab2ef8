"""The `when` language: which tokens of a request a function acts on.

    all  prompt  generated  last_token  positions(a:b)  token_in(name or ids)
    after(condition)  and  or  not  ( )

Python's own parser reads it and a whitelist of its node types is accepted; nothing is
ever evaluated.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from eyesplice._errors import SpecError
from eyesplice.fx_passes.marked import (
    MAX_DEPTH,
    MAX_LENGTH,
    Source,
    normalise,
    replaced,
)
from eyesplice.fx_passes.plain import did_you_mean
from eyesplice.fx_passes.program import Clause
from eyesplice.fx_passes.token_names import TokenNames
from eyesplice.ops.layout import (
    INT32_MAX,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
)

__all__ = [
    "MAX_DEPTH",
    "MAX_LENGTH",
    "ClauseBuilder",
    "Condition",
    "TokenNames",
    "check_condition",
    "normalise",
    "parse_condition",
    "resolve_condition",
    "token_sets_of",
    "too_many_bits",
]

_NAMES: Final = {
    "all": Clause(ClauseKind.ALL),
    "prompt": Clause(ClauseKind.PROMPT),
    "generated": Clause(ClauseKind.GENERATED),
    "last_token": Clause(ClauseKind.LAST),
}
_CALLS: Final = ("positions", "token_in", "after")
_ALLOWED: Final = (
    "all, prompt, generated, last_token and positions(a:b), token_in(name) or "
    "token_in(ids), after(condition), joined by and, or, not and parentheses"
)
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_ ():+-]")
_ARGUMENTS: Final = re.compile(r"\b(positions|token_in) *\(([^()]*)\)")
_INTEGER: Final = r" *([+-]? *[0-9]+)? *"
_RANGE: Final = re.compile(f"{_INTEGER}(?:(:){_INTEGER})?")
_IDS: Final = re.compile(r" *(\[)? *([0-9]+(?: *, *[0-9]+)*)? *,? *(?(1)\]) *")
_SET: Final = re.compile(r""" *(?:([A-Za-z_][\w./-]*)|"([^"]+)"|'([^']+)') *""")


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids listed in the condition itself, ascending."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Combination:
    """Conditions joined by AND, OR or NOR, or one that AFTER looks back for."""

    kind: ClauseKind
    parts: tuple["Condition", ...]


Condition: TypeAlias = Clause | TokenIds | Combination


def check_condition(text: str) -> None:
    """Refuse what is no condition in any model; a token set may have any name.

    Raises:
        SpecError: as `parse_condition`.
    """
    _Parser(text, TokenNames(sets=None)).parse()


def parse_condition(text: str, names: TokenNames | None = None) -> Condition:
    """The condition that a `when` string states.

    Raises:
        SpecError: too long, malformed, something else than the language has, or an
            unknown token set or id; the message marks the place.
    """
    return _Parser(text, names or TokenNames()).parse()


def resolve_condition(text: str, names: TokenNames) -> str:
    """The condition single-spaced, its token sets under their full names.

    Raises:
        SpecError: as `parse_condition`.
    """
    parser = _Parser(text, names)
    parser.parse()
    return replaced(parser.source.text, parser.renamed)


def token_sets_of(text: str) -> Iterator[str]:
    """The full names of the token sets of a resolved condition."""
    for found in _ARGUMENTS.finditer(text):
        if found[1] == "token_in" and (name := _SET.fullmatch(found[2])):
            yield next(filter(None, name.groups()))


@dataclass
class ClauseBuilder:
    """The clauses of one program, each written once, and the ids that they list."""

    clauses: list[Clause] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    names: TokenNames = field(default_factory=TokenNames)

    def add(self, text: str) -> int:
        """Index of the clause that is true where the condition `text` is.

        Raises:
            SpecError: as `parse_condition`, more than MAX_CLAUSES clauses, or more than
                MAX_TOKEN_IDS listed ids.
        """
        try:
            return self._index(parse_condition(text, self.names))
        except _TooManyClauses:
            raise too_many_bits("when", text) from None
        except _TooManyIds:
            raise SpecError(
                "when",
                text,
                f"at most {MAX_TOKEN_IDS} listed token ids in one request",
                "name a token set of an app",
            ) from None

    def nowhere(self) -> int:
        """Index of the clause that is never true.

        Raises:
            SpecError: more than MAX_CLAUSES clauses.
        """
        try:
            return self._intern(Clause(ClauseKind.FALSE))
        except _TooManyClauses:
            raise too_many_bits("when", "not all") from None

    def _index(self, condition: Condition) -> int:
        if isinstance(condition, Clause):
            return self._intern(condition)
        if isinstance(condition, TokenIds):
            first = self._first_id(condition.ids)
            stop = first + len(condition.ids)
            return self._intern(Clause(ClauseKind.TOKEN_LIST, first, stop))
        parts = {self._index(part) for part in condition.parts}
        if len(parts) == 1 and condition.kind is not ClauseKind.AFTER:
            (part,) = parts
            if condition.kind is not ClauseKind.NOR:
                return part
            inner = self.clauses[part]
            if inner.kind is ClauseKind.NOR and inner.a.bit_count() == 1:
                return inner.a.bit_length() - 1
        return self._intern(Clause(condition.kind, sum(1 << part for part in parts)))

    def _first_id(self, ids: tuple[int, ...]) -> int:
        """Where the ids lie in `token_ids`, appended if they are not there in a row."""
        for first in range(len(self.token_ids)):
            if tuple(self.token_ids[first : first + len(ids)]) == ids:
                return first
        if len(self.token_ids) + len(ids) > MAX_TOKEN_IDS:
            raise _TooManyIds
        self.token_ids.extend(ids)
        return len(self.token_ids) - len(ids)

    def _intern(self, clause: Clause) -> int:
        if clause not in self.clauses:
            if len(self.clauses) == MAX_CLAUSES:
                raise _TooManyClauses
            self.clauses.append(clause)
        return self.clauses.index(clause)


def too_many_bits(field: str, text: str) -> SpecError:
    """The error when conditions and gates need more bits than `select` has."""
    return SpecError(
        field,
        text,
        f"at most {MAX_CLAUSES} different conditions in one request, parts of combined "
        "ones and gates counted",
        "use fewer or simpler conditions",
    )


class _TooManyClauses(Exception):
    """The program's clause list is full."""


class _TooManyIds(Exception):
    """The program's list of token ids is full."""


class _Parser:
    """One parse of a condition."""

    def __init__(self, text: str, names: TokenNames) -> None:
        self.source = Source("when", text, _ALLOWED)
        self.names = names
        self.leaves: dict[int, Condition] = {}
        self.renamed: list[tuple[int, int, str]] = []

    def parse(self) -> Condition:
        # Arguments of `positions` and `token_in` are not Python: leave the names, padded
        # to the same length so that the parser's columns are those of the source, and
        # keep what the arguments say aside.
        text = self.source.text
        bare = _ARGUMENTS.sub(lambda found: found[1].ljust(len(found[0])), text)
        first_foreign = _FOREIGN.search(bare)
        for found in _ARGUMENTS.finditer(text):
            if first_foreign and first_foreign.start() < found.start():
                break
            take = self._positions if found[1] == "positions" else self._tokens
            self.leaves[found.start()] = take(found)
        if first_foreign:
            raise self.source.error(first_foreign.start(), "unexpected character")
        return self._convert(self.source.parse(bare), 0)

    def _positions(self, found: re.Match[str]) -> Condition:
        numbers = _RANGE.fullmatch(found[2])
        if not numbers or not (numbers[1] or numbers[2]):
            raise self.source.error(
                found.start(2), "expected whole numbers a:b, or one"
            )
        start, colon, stop = numbers.groups()
        a = self._number(start, found.start(2))
        b = self._number(stop, found.start(2))
        return _range(a, b) if colon else _single(a or 0)

    def _number(self, digits: str | None, column: int) -> int | None:
        if digits is None:
            return None
        value = int(digits.replace(" ", ""))
        if abs(value) > INT32_MAX:
            raise self.source.error(column, f"positions go up to {INT32_MAX}")
        return value

    def _tokens(self, found: re.Match[str]) -> Condition:
        column = found.start(2)
        if (listed := _IDS.fullmatch(found[2])) and listed[2]:
            ids = sorted({int(digits) for digits in listed[2].split(",")})
            if ids[-1] >= self.names.vocab_size:
                raise self.source.error(
                    column,
                    f"token ids of this model go up to {self.names.vocab_size - 1}",
                )
            return TokenIds(tuple(ids))
        if named := _SET.fullmatch(found[2]):
            name = next(filter(None, named.groups()))
            return self._token_set(name, column, found.end(2))
        raise self.source.error(column, "expected a token set's name, or token ids")

    def _token_set(self, name: str, column: int, end: int) -> Clause:
        sets, full = self.names.sets, self.names.full(name)
        if full is None:
            assert sets is not None
            known = sorted({s.rpartition("/")[2] for s in sets} | set(sets))
            near = did_you_mean(name, known)
            hint = f", did you mean {near}?" if near else ": token sets belong to apps"
            raise self.source.error(column, f"unknown token set{hint}")
        self.renamed.append((column, end, f'"{full}"'))
        return Clause(ClauseKind.TOKEN_SET, sets[full].row if sets else 0)

    def _convert(self, node: ast.expr, depth: int) -> Condition:
        self.source.check_depth(node, depth)
        match node:
            case ast.Name(id="positions" | "token_in") if (
                node.col_offset in self.leaves
            ):
                return self.leaves[node.col_offset]
            case ast.Name(id=name):
                return self._named(name, node)
            case ast.BoolOp(op=op, values=values):
                kind = ClauseKind.AND if isinstance(op, ast.And) else ClauseKind.OR
                parts = tuple(self._convert(value, depth + 1) for value in values)
                return Combination(kind, parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Combination(ClauseKind.NOR, (self._convert(operand, depth + 1),))
            case ast.Call(func=ast.Name(id="after"), args=[inner], keywords=[]):
                return Combination(ClauseKind.AFTER, (self._convert(inner, depth + 1),))
        raise self.source.error(node, "not a condition")

    def _named(self, name: str, node: ast.expr) -> Clause:
        if name in _NAMES:
            return _NAMES[name]
        why = {
            "positions": "needs positions, as in (a:b)",
            "token_in": "needs a token set, as in (name) or ([198, 271])",
            "after": "needs a condition, as in (token_in(name))",
        }.get(name)
        if why is None:
            near = did_you_mean(name, (*_NAMES, *_CALLS))
            why = "unknown name" + (f", did you mean {near}?" if near else "")
        raise self.source.error(node, why)


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
