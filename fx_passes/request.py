"""What a request asks for, from a client's words to resolved, hashable functions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import token_sets_of
from eyesplice.fx_passes.context import Context, TokenSet, VectorInfo, VectorTable
from eyesplice.fx_passes.expansion import expand_app, refuse_app
from eyesplice.fx_passes.functions import Function, check_names, paths_of, qualified
from eyesplice.fx_passes.hotwire import parse_hotwire
from eyesplice.fx_passes.models import MAX_FUNCTIONS, RequestModel, validate
from eyesplice.fx_passes.origin import Origin
from eyesplice.fx_passes.plain import load_json, plain, within
from eyesplice.fx_passes.reads import Read, parse_read
from eyesplice.fx_passes.tensors import digests
from eyesplice.fx_passes.writes import Write, parse_write

__all__ = [
    "Context",
    "Function",
    "Read",
    "Request",
    "VectorInfo",
    "VectorTable",
    "Write",
    "parse_canonical",
    "parse_request",
]

OFF: Final = "off"


@dataclass(frozen=True, slots=True)
class Request:
    """Everything one request does.

    Attributes:
        functions: reads and writes in the order in which they are declared: those of
            apps, then the request's own reads, then its own writes.
        stream_scores: whether every chunk of a streamed answer has its scores.
        apps: the apps that take part.
    """

    functions: tuple[Function, ...] = ()
    stream_scores: bool = False
    apps: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[Write, ...]:
        """The writes, in order."""
        return tuple(f for f in self.functions if isinstance(f, Write))

    @property
    def reads(self) -> tuple[Read, ...]:
        """The reads, in order."""
        return tuple(f for f in self.functions if isinstance(f, Read))

    def canonical(self) -> str:
        """JSON text that `parse_canonical` turns into an equal request.

        Equal requests have equal texts.
        """
        return _text(
            {
                "apps": list(self.apps),
                "functions": [function.to_json() for function in self.functions],
                "stream_scores": self.stream_scores,
            }
        )

    def digest(
        self, vectors: VectorTable, token_sets: Mapping[str, TokenSet] | None = None
    ) -> str:
        """Hash of the functions and of the content of what they name: "sha256:...".

        Args:
            vectors: the registered tensors.
            token_sets: the named token sets.

        Raises:
            SpecError: a tensor or a token set is no longer registered.
        """
        tensors = {name for f in self.functions for name in f.tensors}
        sets = {}
        for name in sorted({n for f in self.functions for n in token_sets_of(f.when)}):
            if token_sets is None or name not in token_sets:
                raise SpecError(
                    "token set",
                    name,
                    "a token set of a deployed app",
                    "deploy it again",
                )
            sets[name] = token_sets[name].digest
        functions = [function.to_json() for function in self.functions]
        text = _text([functions, digests(vectors, tensors), sets])
        return (
            "sha256:"
            + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        )


def parse_request(
    extra_args: Mapping[str, object] | None, context: Context
) -> Request | None:
    """The request stated by a request's `extra_args`.

    A request that names no apps, by no key `apps` and no app's name, gets the default ones.

    Args:
        extra_args: as in `SamplingParams`; the keys read are `eyesplice` (the name of an
            app, "off", an object or its JSON text) and `hotwire`.
        context: what the model offers.

    Returns:
        The request, or None if `eyesplice` is "off", or if neither key is there and there
        are no default apps.

    Raises:
        SpecError: anything else than a request that can be served as written.
    """
    extra_args = extra_args or {}
    value, hotwire = extra_args.get("eyesplice"), extra_args.get("hotwire")
    off = isinstance(value, str) and value == OFF
    if off and hotwire is not None:
        raise SpecError(
            "eyesplice",
            OFF,
            "an object beside the key hotwire",
            'leave out either "off" or hotwire',
        )
    defaults = _default_apps(context)
    if off or (value is None and hotwire is None and not defaults):
        return None
    model = validate(RequestModel, {} if value is None else _object(value, context), "")
    return _request(model, hotwire, defaults, context)


def parse_canonical(text: str, context: Context) -> Request:
    """The request whose canonical text this is.

    Raises:
        SpecError: not such a text, or the model does not offer what it names any more.
    """
    try:
        # Our own text: spelt out, it may be longer than any that a client can send.
        value = json.loads(text)
        apps, entries = value["apps"], value["functions"]
        stream_scores = value["stream_scores"]
        functions = tuple(_canonical(dict(entry), context) for entry in entries)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            "eyesplice",
            text,
            "the canonical text of a request",
            "send the request anew",
        ) from None
    return _checked(Request(functions, bool(stream_scores), tuple(apps)), context)


def _canonical(entry: dict[str, Any], context: Context) -> Function:
    origin = Origin(entry.pop("app", None))
    parse = parse_read if "read" in entry else parse_write
    return parse(entry, str(entry.get("name", "functions")), context, origin)


def _request(
    model: RequestModel,
    hotwire: object,
    defaults: Mapping[str, dict[str, Any]],
    context: Context,
) -> Request:
    apps = defaults if model.apps is None else model.apps
    functions: list[Function] = []
    for name, overrides in apps.items():
        functions += expand_app(name, overrides, context)
    for i, read in enumerate(model.reads):
        functions.append(parse_read(read, f"reads[{i}]", context))
    for i, write in enumerate(model.writes):
        functions.append(parse_write(write, f"writes[{i}]", context))
    for value in (model.hotwire, hotwire):
        if value is not None:
            functions += parse_hotwire(value, context)
    if len(functions) > MAX_FUNCTIONS:
        writes = sum(isinstance(function, Write) for function in functions)
        raise SpecError(
            "eyesplice",
            f"{writes} writes and {len(functions) - writes} reads, those of apps and "
            "hotwire counted",
            f"at most {MAX_FUNCTIONS} in one request",
            "send fewer",
        )
    return _checked(
        Request(tuple(functions), model.stream_scores, tuple(apps)), context
    )


def _checked(request: Request, context: Context) -> Request:
    """The request with its gates resolved, reads under their full names.

    Raises:
        SpecError: a gate that is malformed or names no score, or a name given twice.
    """
    functions = request.functions
    check_names(functions)
    return replace(request, functions=_with_gates(functions, context))


def _with_gates(
    functions: Sequence[Function], context: Context
) -> tuple[Function, ...]:
    found = []
    for path, function in zip(paths_of(functions), functions, strict=True):
        if function.gate is not None:
            with within(path):
                gate = qualified(
                    function.gate, functions, function.app, context.num_layers
                )
            found.append(replace(function, gate=gate))
        else:
            found.append(function)
    return tuple(found)


def _default_apps(context: Context) -> dict[str, dict[str, Any]]:
    """The default apps, less those that are disabled."""
    apps = context.apps
    return {n: {} for n in context.default_apps if n not in apps or apps[n].enabled}


def _object(value: object, context: Context) -> object:
    if not isinstance(value, str):
        return plain(value, "")
    if value.lstrip()[:1] == "{":
        return load_json(value, "")
    if value not in context.apps:
        refuse_app(value, context)
    return {"apps": {value: {}}}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
