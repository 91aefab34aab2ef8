"""Requests in the form of hotwire-vllm, read with its meaning.

    {"id": "pirate", "layer": 20, "scale": 4.0, "decode_only": true}, or a list of these

Each adds `scale` times row `layer` of a vector to `residual.post` of that layer. There,
a layer takes one vector per token: of entries with the same layer the last one wins.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, StrictBool

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.models import (
    MAX_FUNCTIONS,
    Name,
    Number,
    StrictModel,
    validate,
)
from eyesplice.fx_passes.plain import join, load_json, plain, renaming
from eyesplice.fx_passes.writes import Write, parse_write

_KEYS: Final = {"vector": "id", "layers": "layer"}
"""What hotwire calls the keys of a write."""


def _as_int(value: object) -> object:
    """hotwire-vllm passes a layer through int(): take all that is a whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _as_number(value, int)


def _as_float(value: object) -> object:
    return _as_number(value, float)


def _as_number(value: object, kind: type[int] | type[float]) -> object:
    if not isinstance(value, str) or len(value) > 40:
        return value
    try:
        return kind(value)
    except ValueError:
        return value


class HotwireModel(StrictModel):
    """One hotwire entry; numbers may be strings, as hotwire-vllm converts them."""

    id: Name = Field(description="the name of a registered vector")
    layer: Annotated[int, BeforeValidator(_as_int)] = Field(
        description="a decoder layer, a whole number"
    )
    scale: Annotated[Number, BeforeValidator(_as_float)] = Field(
        1.0, description="a finite number"
    )
    decode_only: StrictBool | None = Field(None, description="true or false")


def parse_hotwire(value: object, context: Context) -> tuple[Write, ...]:
    """The writes that a hotwire value states.

    Args:
        value: an entry, a list of entries, or the JSON text of either.
        context: what the model offers.

    Raises:
        SpecError: malformed, or a vector, layer or site that is not there.
    """
    entries: Any = (
        load_json(value, "hotwire")
        if isinstance(value, str)
        else plain(value, "hotwire")
    )
    if not isinstance(entries, list):
        entries = [entries]
    if len(entries) > MAX_FUNCTIONS:
        raise SpecError(
            "hotwire",
            f"{len(entries)} entries",
            f"at most {MAX_FUNCTIONS}",
            "send fewer",
        )
    writes = [
        _write(entry, f"hotwire[{i}]", context) for i, entry in enumerate(entries)
    ]
    return tuple(_last_wins(writes))


def _write(value: object, path: str, context: Context) -> Write:
    entry = validate(HotwireModel, value, path)
    write = {
        "vector": entry.id,
        "layers": entry.layer,
        "scale": entry.scale,
        "when": "generated" if entry.decode_only else "all",
    }
    with renaming({join(path, key): join(path, name) for key, name in _KEYS.items()}):
        return parse_write(write, path, context)


def _last_wins(writes: Sequence[Write]) -> list[Write]:
    """Each write on the tokens that no later write of its layer takes."""
    kept = []
    for i, write in enumerate(writes):
        later = {w.when for w in writes[i + 1 :] if w.layers == write.layers}
        if "all" in later or write.when in later:
            continue
        kept.append(replace(write, when="prompt") if later else write)
    return kept
