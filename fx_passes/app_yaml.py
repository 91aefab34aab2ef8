"""YAML text to plain values and back, with nothing in it that can run or explode.

Built on the parser's events, so that no constructor is involved: scalars are those of
YAML 1.2's core schema (`off`, `1:30` and dates are strings), aliases count at each
use, and tags, merge keys and keys given twice are refused.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import MAX_NESTING, MAX_VALUES, plain, printable

MAX_YAML_BYTES: Final = 2**20

_LARGE_BYTES: Final = 2**16
_FAST_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser, where it is there, for large texts: it takes a tenth of the time.

PyYAML's own is stricter and says better what it expected, so texts of a size that people
write get its refusals, whatever is installed.
"""

_INT: Final = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT: Final = re.compile(
    r"[-+]?(\.[0-9]{1,400}|[0-9]{1,400}(\.[0-9]{0,400})?)([eE][-+]?[0-9]{1,400})?"
)
_WORDS: Final[dict[str, Any]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}


def load_yaml(data: bytes, path: str) -> Any:
    """The plain value of one YAML document.

    Args:
        data: the text, UTF-8.
        path: what the error names.

    Raises:
        SpecError: not one YAML document, over the limits, or not plain.
    """
    if len(data) > MAX_YAML_BYTES:
        _refuse(path, f"{len(data)} bytes", f"it has more than {MAX_YAML_BYTES} bytes")
    try:
        value = _Reader(data.decode(), path, _loader(len(data))).document()
    except SpecError:
        raise
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark
        line = f" in line {where.line + 1}" if where else ""
        _refuse(path, "YAML", f"{error.problem or error.context}{line}")
    # The parser gives malformed escapes and directives away by whatever they cause.
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        _refuse(path, "YAML", why[:200])
    return plain(value, path)


def dump_yaml(value: dict[str, Any]) -> str:
    """The YAML text that `load_yaml` and any other reader take for `value`."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=88
    )
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc] # PyYAML ships no types
    """Quotes what YAML 1.1 or 1.2 would take for something else than a string."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(f"^(?:{_FLOAT.pattern})$"),
    list("-+.0123456789"),
)


def _loader(num_bytes: int) -> Any:
    return _FAST_LOADER if num_bytes > _LARGE_BYTES else yaml.SafeLoader


class _Reader:
    """One reading of a text; `count` bounds the values made."""

    def __init__(self, text: str, path: str, loader: Any) -> None:
        self.path = path
        self.events: Iterator[Event] = yaml.parse(text, Loader=loader)
        self.anchors: dict[str, Any] = {}
        self.count = 0

    def document(self) -> Any:
        next(self.events)
        if isinstance(next(self.events), StreamEndEvent):
            self.refuse("it is empty")
        value = self.value(next(self.events), 0)
        next(self.events)
        if isinstance(next(self.events), DocumentStartEvent):
            self.refuse("it has more than one document")
        return value

    def value(self, event: Event, depth: int) -> Any:
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_NESTING:
            self.refuse(f"it has more than {MAX_VALUES} values or {MAX_NESTING} levels")
        if isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                self.refuse(f"the alias {printable(event.anchor[:80])} names nothing")
            return self.anchors[event.anchor]
        # "!" alone asks for a string, which quotes do as well.
        if event.tag is not None:
            self.refuse(f"the tag {printable(event.tag[:80])}: tags are not read")
        value = self.untagged(event, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = value
        return value

    def untagged(self, event: Event, depth: int) -> Any:
        match event:
            case ScalarEvent(value=text):
                return _scalar(text) if event.implicit[0] else text
            case SequenceStartEvent():
                items = []
                while not isinstance(item := next(self.events), SequenceEndEvent):
                    items.append(self.value(item, depth + 1))
                return items
            case MappingStartEvent():
                return self.mapping(depth)
        raise AssertionError(event)

    def mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key = self.value(event, depth + 1)
            if not isinstance(key, str):
                self.refuse(f"a key of type {type(key).__name__} is not a string")
            if key == "<<":
                self.refuse("merge keys (<<) are not read")
            if key in found:
                self.refuse(f"the key {printable(key[:80])!r} is given twice")
            found[key] = self.value(next(self.events), depth + 1)
        return found

    def refuse(self, why: str) -> NoReturn:
        _refuse(self.path, "YAML", why)


def _scalar(text: str) -> Any:
    """A plain (unquoted) scalar's value."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _refuse(path: str, value: object, why: str) -> NoReturn:
    raise SpecError(
        path,
        value,
        f"one plain YAML document of at most {MAX_YAML_BYTES} bytes",
        f"correct it: {why}",
    )
