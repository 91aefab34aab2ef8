"""What a request asks for, from a client's words to resolved, hashable writes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context, VectorInfo, VectorTable
from eyesplice.fx_passes.hotwire import parse_hotwire
from eyesplice.fx_passes.models import AVAILABLE, MAX_WRITES, RequestModel, validate
from eyesplice.fx_passes.plain import load_json, plain
from eyesplice.fx_passes.writes import KERNELS, Kernel, Write, parse_write

__all__ = [
    "KERNELS",
    "Context",
    "Kernel",
    "Request",
    "VectorInfo",
    "VectorTable",
    "Write",
    "parse_request",
]


@dataclass(frozen=True, slots=True)
class Request:
    """Everything one request does, in the order it is done."""

    writes: tuple[Write, ...]

    def canonical(self) -> str:
        """JSON text that `parse_request` turns into an equal request.

        Equal requests have equal texts.
        """
        value = {"writes": [write.to_json() for write in self.writes]}
        return json.dumps(
            value, sort_keys=True, ensure_ascii=False, separators=(",", ":")
        )

    def digest(self, vectors: VectorTable) -> str:
        """Hash of the request and of the content of its vectors: "sha256:...".

        Raises:
            SpecError: a vector is no longer registered.
        """
        contents = {}
        for name in sorted({write.vector for write in self.writes}):
            info = vectors.info(name)
            if info is None:
                raise SpecError(
                    "vector", name, "a registered vector", "register it again"
                )
            contents[name] = info.digest
        text = json.dumps([self.canonical(), contents], sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def parse_request(
    extra_args: Mapping[str, object] | None, context: Context
) -> Request | None:
    """The request stated by a request's `extra_args`.

    Args:
        extra_args: as in `SamplingParams`; the keys read are `eyesplice` ("off", an
            object or its JSON text) and `hotwire`.
        context: what the model offers.

    Returns:
        The request, or None if neither key is there or `eyesplice` is "off".

    Raises:
        SpecError: anything else than a request that can be served as written.
    """
    if not extra_args:
        return None
    value, hotwire = extra_args.get("eyesplice"), extra_args.get("hotwire")
    off = isinstance(value, str) and value == "off"
    if off and hotwire is not None:
        raise SpecError(
            "eyesplice",
            "off",
            "an object beside the key hotwire",
            'leave out either "off" or hotwire',
        )
    if off or (value is None and hotwire is None):
        return None
    writes: tuple[Write, ...] = ()
    if value is not None:
        writes += _own_writes(value, context)
    if hotwire is not None:
        writes += parse_hotwire(hotwire, context)
    if len(writes) > MAX_WRITES:
        raise SpecError(
            "eyesplice",
            f"{len(writes)} writes, those of hotwire counted",
            f"at most {MAX_WRITES} in one request",
            "send fewer writes",
        )
    return Request(writes)


def _own_writes(value: object, context: Context) -> tuple[Write, ...]:
    """The writes under the key `eyesplice`, then those of its own `hotwire`."""
    model = validate(RequestModel, _object(value), "")
    writes = tuple(
        parse_write(write, f"writes[{i}]", context)
        for i, write in enumerate(model.writes)
    )
    if model.hotwire is not None:
        writes += parse_hotwire(model.hotwire, context)
    return writes


def _object(value: object) -> object:
    if not isinstance(value, str):
        return plain(value, "")
    if value.lstrip()[:1] == "{":
        return load_json(value, "")
    raise SpecError(
        "eyesplice",
        value,
        f'"off", or an object (or its JSON text) with {AVAILABLE}. Apps, which a name '
        "stands for, are not available in this version",
        "send an object with writes",
    )
