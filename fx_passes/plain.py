"""Bounded, plain JSON values from whatever a client sends."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from eyesplice._errors import SpecError

MAX_JSON_BYTES: Final = 2**20
MAX_NESTING: Final = 32
MAX_VALUES: Final = 100_000
"""Values in one object, counted where they are used: shared lists count each time."""


def plain(value: object, path: str) -> Any:
    """A copy of `value` made of None, bool, int, float, str, list and dict only.

    Args:
        value: a Python value; a tuple or range becomes a list.
        path: what the error names, e.g. `hotwire`; empty for the request's own object.

    Raises:
        SpecError: another type, a number that is not finite or beyond 64 bits, a key
            that is not a string, or too deep or too many values.
    """
    return _Copier().copy(value, path, 0)


def load_json(text: str, path: str) -> Any:
    """The value of a JSON text, as plain as that of `plain`.

    Raises:
        SpecError: not JSON, over the limits, NaN or Infinity, or a key given twice.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_JSON_BYTES:
        raise SpecError(
            path or "eyesplice",
            f"{size} bytes of JSON",
            f"at most {MAX_JSON_BYTES} bytes",
            "send less in one request",
        )
    try:
        value = json.loads(
            text, parse_constant=_no_constant, object_pairs_hook=no_repeats
        )
    except (ValueError, RecursionError, MemoryError) as error:
        why = str(error) or type(error).__name__
        raise SpecError(
            path or "eyesplice",
            text,
            f"a JSON object ({why})",
            "correct the JSON text",
        ) from None
    return plain(value, path)


def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object for `json.loads`, its hook: a key given twice is an error.

    Raises:
        ValueError: naming the key.
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {printable(key[:80])!r} is given twice")
        result[key] = value
    return result


def join(path: str, key: str | int) -> str:
    """The path of an item of `path`, short and printable whatever the key."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    shown = printable(key[:80])
    return f"{path}.{shown}" if path else shown


def printable(text: str) -> str:
    """The text, of the same length, with unprintable characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in text)


def number(value: float) -> float:
    """The float of an int or float; -0.0 becomes 0.0, so equal requests hash equally."""
    return float(value) + 0.0


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, None if none is close."""
    return next(iter(get_close_matches(word[:80], list(known), n=1)), None)


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown word: the known one that is close, else `otherwise`."""
    near = did_you_mean(word, known)
    return f"write {near} (did you mean that?)" if near else otherwise


@contextmanager
def within(path: str) -> Iterator[None]:
    """Put `path` before the thing that a `SpecError` raised inside names.

    An error about the whole of `path` names nothing.
    """
    try:
        yield
    except SpecError as error:
        thing = join(path, error.thing) if error.thing else path
        raise SpecError(thing, error.value, error.allowed, error.remedy) from None


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let a `SpecError` raised inside name a thing as its author calls it.

    Args:
        names: by what it is called inside; other things keep their names.
    """
    try:
        yield
    except SpecError as error:
        if error.thing not in names:
            raise
        thing = names[error.thing]
        raise SpecError(thing, error.value, error.allowed, error.remedy) from None


@dataclass
class _Copier:
    """A copy in progress; `count` bounds values that are shared or cyclic."""

    count: int = 0

    def copy(self, value: object, path: str, depth: int) -> Any:
        self.count += 1
        if depth > MAX_NESTING:
            raise _misfit(path, f"nesting deeper than {MAX_NESTING}")
        if self.count > MAX_VALUES:
            raise _misfit(path, f"more than {MAX_VALUES} values")
        match value:
            case None | bool():
                return value
            case str():
                return str.__str__(value)
            case int() if -(2**63) <= value < 2**63:
                return int(value)
            case float() if math.isfinite(value):
                return float(value)
            case int():
                raise _misfit(path, f"an integer of {value.bit_length()} bits")
            case float():
                raise _misfit(path, f"{value}")
            case list() | tuple() | range():
                return self._list(value, path, depth)
            case dict():
                return self._dict(value, path, depth)
        raise _misfit(path, f"a value of type {type(value).__name__}")

    def _list(self, value: Iterable[object], path: str, depth: int) -> list[Any]:
        return [
            self.copy(item, join(path, i), depth + 1) for i, item in enumerate(value)
        ]

    def _dict(
        self, value: dict[Any, object], path: str, depth: int
    ) -> dict[str, object]:
        result = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise _misfit(path, f"a key of type {type(key).__name__}")
            result[str.__str__(key)] = self.copy(item, join(path, key), depth + 1)
        return result


def _misfit(path: str, what: str) -> SpecError:
    return SpecError(
        path or "eyesplice",
        what,
        "JSON values: finite numbers of at most 64 bits, strings, lists and objects "
        f"with string keys, {MAX_VALUES} values in all, at most {MAX_NESTING} levels deep",
        "send plain JSON",
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
