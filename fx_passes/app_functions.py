"""One function of an app, checked as far as that needs no model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.app_tensors import tensor_fields
from eyesplice.fx_passes.conditions import (
    TokenNames,
    check_condition,
    parse_condition,
)
from eyesplice.fx_passes.context import TokenSet
from eyesplice.fx_passes.gates import (
    Reference,
    Resolve,
    ScoreKey,
    check_gate,
    parse_gate,
)
from eyesplice.fx_passes.kernels import FIELDS, SCORE_KERNELS, Kind, is_own_op
from eyesplice.fx_passes.models import (
    FunctionModel,
    ReadModel,
    WriteModel,
    check_own_fields,
    validate,
)
from eyesplice.fx_passes.plain import did_you_mean, join, plain, suggestion, within
from eyesplice.fx_passes.sites import parse_layers, parse_submodule

MAX_LAYERS: Final = 1000
"""More decoder layers than any model has: what a layer may be before one is known."""


def check_function(value: object, path: str) -> dict[str, Any]:
    """The function's YAML entry, plain, with the names of its tensors filled in.

    Args:
        value: an entry: `{"read": kernel, ...}` or `{"write": kernel, ...}`.
        path: where it stands, for the error.

    Raises:
        SpecError: what no model and no app could make sense of.
    """
    entry = plain(value, path)
    if not isinstance(entry, dict) or ("read" in entry) == ("write" in entry):
        raise SpecError(
            path or "function",
            value,
            "an object with either the key read or the key write",
            "say which kernel it is: {read: probe, ...} or {write: ablate, ...}",
        )
    kind: Kind = "read" if "read" in entry else "write"
    kernel = _kernel(kind, entry[kind], path)
    given = {key: value for key, value in entry.items() if value is not None}
    filled = {kind: kernel, **{f: f for f in tensor_fields(kind, kernel)}} | given
    shape: type[FunctionModel] = ReadModel if kind == "read" else WriteModel
    model = validate(shape, filled, path)
    with within(path):
        check_own_fields(kind, kernel, model)
        _check_place(filled)
        check_condition(model.when)
        if model.gate is not None:
            check_gate(model.gate)
    return filled


def _kernel(kind: Kind, name: object, path: str) -> str:
    known = FIELDS[kind]
    if isinstance(name, str) and (
        name in known or (kind == "write" and is_own_op(name))
    ):
        return name
    more = ", or an op of your own (lib::op)" if kind == "write" else ""
    other = "use one of these"
    raise SpecError(
        join(path, kind),
        name,
        "the kernels " + ", ".join(known) + more,
        suggestion(name, known, other) if isinstance(name, str) else other,
    )


def _check_place(entry: Mapping[str, Any]) -> None:
    if entry.get("submodule") is not None:
        parse_submodule(entry["submodule"])
    layers = entry.get("layers")
    if layers is None:
        return
    if isinstance(layers, list) and len(layers) > MAX_LAYERS:
        raise SpecError(
            "layers", f"{len(layers)} items", f"at most {MAX_LAYERS}", "use a range"
        )
    parse_layers(layers, MAX_LAYERS)


def check_meaning(
    functions: Sequence[Mapping[str, Any]], token_sets: Iterable[str]
) -> None:
    """Refuse functions that mean nothing together: missing layers, unknown names.

    Args:
        functions: the app's entries, each checked by itself.
        token_sets: the names of the app's token sets.

    Raises:
        SpecError: naming the function and the key.
    """
    names = TokenNames({name: TokenSet(0, "") for name in token_sets})
    resolve = _resolver(functions)
    for i, entry in enumerate(functions):
        with within(f"functions[{i}]"):
            _check_layers_given(entry)
            parse_condition(entry.get("when", "all"), names)
            if "gate" in entry:
                parse_gate(entry["gate"], resolve)


def _resolver(functions: Sequence[Mapping[str, Any]]) -> Resolve:
    """How gates find the app's reads, as far as that needs no number of layers."""
    reads = {
        entry.get("name", str(i)): (i, entry["read"])
        for i, entry in enumerate(functions)
        if "read" in entry
    }

    def resolve(reference: Reference) -> ScoreKey:
        if reference.name in reads:
            index, kernel = reads[reference.name]
            if kernel not in SCORE_KERNELS:
                raise LookupError(f"a {kernel} has no score")
            return ScoreKey(index, reference.layer or 0, reference.feature or 0)
        kernels = {kernel for _, kernel in reads.values()}
        if reference.layer is not None and reference.name in kernels:
            return ScoreKey(0, reference.layer, reference.feature or 0)
        near = did_you_mean(reference.name, reads)
        there = ", ".join(f"{name} ({kernel})" for name, (_, kernel) in reads.items())
        hint = f", did you mean {near}?" if near else f": there are {there or 'none'}"
        raise LookupError("unknown read" + hint)

    return resolve


def _check_layers_given(entry: Mapping[str, Any]) -> None:
    submodule = entry.get("submodule")
    aliased = submodule is not None and parse_submodule(submodule)[1] is not None
    # A router write may name the layers with the experts.
    routed = any(isinstance(entry.get(k), dict) for k in ("activate", "deactivate"))
    if entry.get("layers") is None and not aliased and not routed:
        raise SpecError(
            "layers", None, 'decoder layers, e.g. [20], "20-29", "all"', "add layers"
        )
