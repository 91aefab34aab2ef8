"""What the two condition languages share: one-line sources and marked errors."""

import ast
from typing import Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import printable

MAX_LENGTH: Final = 2000
MAX_DEPTH: Final = 32


def normalise(text: str) -> str:
    """The condition with single spaces, which is how it is stored and pointed at."""
    return " ".join(text.split())


class Source:
    """One condition as its author wrote it, single-spaced; columns index `text`."""

    def __init__(self, field: str, text: str, allowed: str) -> None:
        if len(text) > MAX_LENGTH:
            raise SpecError(
                field,
                text,
                f"at most {MAX_LENGTH} characters",
                "write a shorter condition",
            )
        self.field = field
        self.text = normalise(text)
        self.allowed = allowed

    def parse(self, python: str) -> ast.expr:
        """The syntax tree of `python`, which has the columns of `text`.

        Raises:
            SpecError: not a Python expression.
        """
        try:
            return ast.parse(python, mode="eval").body
        except SyntaxError as error:
            end = len(self.text)
            column = min((error.offset or end + 1) - 1, end)
            raise self.error(column, "cannot be read here") from None
        except (RecursionError, MemoryError, ValueError):
            raise self.error(0, "cannot be read: too deeply nested, or odd") from None

    def check_depth(self, node: ast.expr, depth: int) -> None:
        """Refuse an expression nested too deeply."""
        if depth > MAX_DEPTH:
            raise self.error(node, f"nested more than {MAX_DEPTH} levels")

    def column(self, node: ast.expr) -> int:
        """The column where a node begins; the parser counts bytes."""
        return len(self.text.encode()[: node.col_offset].decode())

    def end(self, node: ast.expr) -> int:
        """The column behind a node."""
        assert node.end_col_offset is not None
        return len(self.text.encode()[: node.end_col_offset].decode())

    def error(self, at: ast.expr | int, why: str) -> SpecError:
        """The error that marks a node, or a column, of the text."""
        column = at if isinstance(at, int) else self.column(at)
        first = max(0, column - 60)
        line = printable(self.text[first : column + 60])
        mark = " " * (column - first) + "^"
        return SpecError(
            self.field,
            self.text,
            self.allowed,
            f"correct the marked place:\n  {line}\n  {mark} {why}",
        )


def replaced(text: str, spans: list[tuple[int, int, str]]) -> str:
    """The text with each span (first column, column behind, new text) replaced."""
    for start, end, new in sorted(spans, reverse=True):
        text = text[:start] + new + text[end:]
    return text
