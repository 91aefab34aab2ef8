"""Answers that are made when somebody looks at them.

Captured rows and scores become lists and text for the client. Where an engine steps in the
loop that hands its outputs out, every other request would wait for that.
"""

from collections.abc import Callable
from typing import Any


class Later:
    """A value that is made when it is first asked for, and then kept."""

    __slots__ = ("_found", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` is called once, and let go of."""
        self._make: Callable[[], Any] | None = make
        self._found: Any = None

    def value(self) -> Any:
        """What `make` gave."""
        make = self._make
        if make is not None:
            self._found = make()
            self._make = None
        return self._found

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Another process gets the value."""
        return _itself, (self.value(),)


def _itself(value: Any) -> Any:
    return value


class AnswerField:
    """The attribute of an output that holds its answer, None where there is none."""

    def __init__(self, name: str) -> None:
        """The attribute's name."""
        self._place = f"_{name}"

    def __get__(self, output: object | None, owner: type | None = None) -> Any:
        """The answer, made now if nobody has looked at it before."""
        found = None if output is None else self.held(output)
        return found.value() if isinstance(found, Later) else found

    def __set__(self, output: object, answer: Any) -> None:
        """Hold an answer, or one that is made later."""
        vars(output)[self._place] = answer

    def held(self, output: object) -> Any:
        """As it is held: looking does not make it."""
        return vars(output).get(self._place)
