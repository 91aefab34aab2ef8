"""A deployed app in a request: its functions, with the request's own numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context, DeployedApp
from eyesplice.fx_passes.functions import Function
from eyesplice.fx_passes.kernels import FIELDS
from eyesplice.fx_passes.origin import Origin
from eyesplice.fx_passes.plain import join, suggestion
from eyesplice.fx_passes.reads import parse_read
from eyesplice.fx_passes.writes import parse_write

SCALARS: Final = (
    "scale",
    "bias",
    "value",
    "lo",
    "hi",
    "offset",
    "epsilon",
    "threshold",
)
"""What a request may say otherwise than the app."""


def expand_app(
    name: str, overrides: Mapping[str, Any], context: Context
) -> list[Function]:
    """The functions of an app.

    Args:
        name: of a deployed app.
        overrides: scalars for every function that has them, and under `functions` scalars
            for one function each, which go before.
        context: what the model offers.

    Raises:
        SpecError: an unknown or disabled app, an override that fits no function, or a
            function that this model cannot serve.
    """
    app = context.apps.get(name)
    if app is None:
        refuse_app(name, context)
    if not app.enabled:
        raise SpecError(
            "app",
            name,
            "enabled apps; this one is disabled",
            f"enable it: POST /v1/eyesplice/apps/{name}/enable",
        )
    entries = _overridden(app, overrides)
    functions: list[Function] = []
    for i, entry in enumerate(entries):
        parse = parse_read if "read" in entry else parse_write
        origin = Origin(name, i)
        path = str(origin.name(_label(app, i)))
        functions.append(parse(entry, path, context, origin))
    return functions


def _overridden(
    app: DeployedApp, overrides: Mapping[str, Any]
) -> Sequence[dict[str, Any]]:
    """The app's entries with the request's numbers in them."""
    path = f"apps.{app.name}"
    scalars = {key: value for key, value in overrides.items() if key != "functions"}
    entries = [dict(entry) for entry in app.functions]
    for key, value in scalars.items():
        having = [entry for entry in entries if key in _scalars_of(entry)]
        if not having:
            _refuse_override(path, key, value, _all_scalars(app), nested=True)
        for entry in having:
            entry[key] = value
    for label, own in _own_overrides(path, overrides).items():
        at = _index(app, label, path)
        where = join(f"{path}.functions", label)
        if not isinstance(own, dict):
            raise SpecError(where, own, "an object of overrides", "send an object")
        for key, value in own.items():
            if key not in _scalars_of(entries[at]):
                _refuse_override(where, key, value, _scalars_of(entries[at]))
            entries[at][key] = value
    return entries


def _own_overrides(path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    value = overrides.get("functions", {})
    if not isinstance(value, dict):
        raise SpecError(
            f"{path}.functions",
            value,
            "an object from functions' names or indices to objects of overrides",
            "send an object",
        )
    return value


def _scalars_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The scalars that a function has: not a bias that is a tensor."""
    kind = "read" if "read" in entry else "write"
    kernel = entry.get(kind, "steering_vector")
    fields = FIELDS["read" if kind == "read" else "write"].get(kernel, ("scale",))
    tensor_bias = isinstance(entry.get("bias"), str) or kernel == "affine"
    return tuple(
        key for key in SCALARS if key in fields and not (key == "bias" and tensor_bias)
    )


def _all_scalars(app: DeployedApp) -> list[str]:
    having = {key for entry in app.functions for key in _scalars_of(entry)}
    return [key for key in SCALARS if key in having]


def _label(app: DeployedApp, index: int) -> str:
    name = app.functions[index].get("name")
    return name if isinstance(name, str) else str(index)


def _index(app: DeployedApp, label: str, path: str) -> int:
    """The index of the function of this name, or at this index."""
    labels = [_label(app, i) for i in range(len(app.functions))]
    if label in labels:
        return labels.index(label)
    if label in map(str, range(len(labels))):
        return int(label)
    raise SpecError(
        f"{path}.functions",
        label,
        f"the functions {', '.join(labels)}",
        suggestion(label, labels, "name one of these"),
    )


def _refuse_override(
    path: str, key: str, value: object, allowed: Iterable[str], nested: bool = False
) -> NoReturn:
    known = [*allowed, *(["functions"] if nested else [])]
    raise SpecError(
        join(path, key),
        value,
        f"the overrides {', '.join(known)}" if known else "no overrides",
        suggestion(key, known, "leave it out"),
    )


def refuse_app(name: str, context: Context) -> NoReturn:
    """Refuse a name that no deployed app has."""
    names = sorted(context.apps)
    shown = ", ".join(names[:20]) or "none are deployed"
    raise SpecError(
        "eyesplice",
        name,
        f'an app ({shown}), "off", or an object (or its JSON text) with writes, reads '
        "or apps",
        suggestion(name, names, "name a deployed app"),
    )
