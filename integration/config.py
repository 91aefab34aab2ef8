"""The user's configuration: the one object under `additional_config["eyesplice"]`."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyesplice._errors import SpecError
from eyesplice.fx_passes.sites import (
    BOUNDARY_SUBMODULES,
    SUBMODULES,
    Site,
    Submodule,
    parse_layers,
    parse_submodule,
)

KEY: Final = "eyesplice"
PASS_NAME: Final = "eyesplice.splice_pass"
CONFIG_VARIABLE: Final = "EYESPLICE_CONFIG"

_LATER: Final = (
    "apps",
    "default",
    "dose",
    "h_norms",
)


class EyespliceConfig(BaseModel):
    """What a deployment switches on.

    Attributes:
        vectors: folder of steering vectors (.safetensors, .pt).
        sites: submodules to arm, as names, TransformerLens aliases or objects with
            `submodule` and `layers`; "all" for every submodule. Default: the seven
            values of each residual-stream boundary.
        ops: op families to compile in, or "all".
        max_entries: entries that one program may have in one table.
        bank_rows: rows of the vector bank; a `[hidden]` vector takes one, a
            `[layers, hidden]` vector takes one per layer.
        on_error: what to do with a request that cannot be served as written.
        allow_registration: whether vectors may be registered over HTTP.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    vectors: str | None = None
    sites: list[str | dict[str, Any]] | Literal["all"] | None = None
    ops: list[Literal["add", "rank1"]] | Literal["all"] = "all"
    max_entries: int = Field(default=8, ge=1, le=64)
    bank_rows: int = Field(default=1024, ge=2, le=1_000_000)
    on_error: Literal["reject"] = "reject"
    allow_registration: Literal[False] = False
    # Set by the plugin, never by the user: part of vLLM's compile-cache key.
    salt: str = ""

    @property
    def explicit_sites(self) -> bool:
        """Whether the user named the sites, so that a missing one is an error."""
        return self.sites is not None and self.sites != "all"

    def wanted(self, num_layers: int, num_experts: int) -> frozenset[Site]:
        """The sites to arm in a model of `num_layers` decoder layers.

        Raises:
            SpecError: a malformed site or a layer out of range.
        """
        chosen: set[Site] = set()
        match self.sites:
            case None:
                chosen |= _at(BOUNDARY_SUBMODULES, range(num_layers))
            case "all":
                names = [s for s in SUBMODULES if num_experts or s != "router.logits"]
                chosen |= _at(names, range(num_layers))
            case _:
                for entry in self.sites:
                    chosen |= _entry(entry, num_layers)
        if not chosen:
            raise SpecError(
                "sites",
                self.sites,
                "at least one submodule",
                "name one, or leave the key out for the default",
            )
        # One value with two names: whoever arms one has armed the other.
        for site in list(chosen):
            if site.submodule == "residual.post" and site.layer + 1 < num_layers:
                chosen.add(Site(site.layer + 1, "residual.pre"))
            elif site.submodule == "residual.pre" and site.layer:
                chosen.add(Site(site.layer - 1, "residual.post"))
        return frozenset(chosen)


def _at(submodules: Iterable[Submodule], layers: Iterable[int]) -> frozenset[Site]:
    return frozenset(Site(layer, name) for name in submodules for layer in layers)


def _entry(entry: str | dict[str, Any], num_layers: int) -> frozenset[Site]:
    plain: dict[str, Any] = {"submodule": entry} if isinstance(entry, str) else entry
    if unknown := set(plain) - {"submodule", "layers"}:
        raise SpecError(
            "sites entry",
            sorted(unknown),
            "the keys submodule and layers",
            "remove the other keys",
        )
    submodule, layer = parse_submodule(plain.get("submodule"))
    layers = plain.get("layers", "all" if layer is None else layer)
    return _at((submodule,), parse_layers(layers, num_layers))


def parse_config(value: object) -> EyespliceConfig:
    """Validate a configuration object.

    Raises:
        SpecError: an unknown key or a value that is not allowed.
    """
    if isinstance(value, Mapping):
        for key in _LATER:
            if value.get(key):
                raise SpecError(
                    f"configuration key {key}",
                    value[key],
                    "nothing yet: this version has no such feature",
                    f"remove {key}",
                )
        value = {k: v for k, v in value.items() if k not in _LATER}
    try:
        return EyespliceConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0]) if first["loc"] else KEY
        keys = ", ".join(sorted(set(EyespliceConfig.model_fields) - {"salt"}))
        known = first["type"] != "extra_forbidden"
        raise SpecError(
            f"configuration key {where}",
            first["input"],
            f"{first['msg']} (keys: {keys})" if known else f"the keys {keys}",
            "correct it in additional_config or in the file of " + CONFIG_VARIABLE,
        ) from error


def requested(
    additional_config: object, inductor_passes: Mapping[str, object]
) -> EyespliceConfig | None:
    """The configuration in force, None when nothing switches eyesplice on.

    The file named by EYESPLICE_CONFIG is overridden key by key by
    `additional_config["eyesplice"]`; the compilation pass flag alone means defaults.

    Raises:
        SpecError: a malformed configuration.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    path = os.environ.get(CONFIG_VARIABLE)
    flagged = PASS_NAME in inductor_passes.values()
    if given is None and not path and not flagged:
        return None
    merged: dict[str, object] = _read(Path(path)) if path else {}
    if given is not None and not isinstance(given, Mapping):
        parse_config(given)
    merged.update(given or {})
    return parse_config(merged)


def _read(path: Path) -> dict[str, object]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(
            CONFIG_VARIABLE,
            str(path),
            "a readable YAML file",
            f"correct it ({error})",
        ) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SpecError(
            CONFIG_VARIABLE,
            str(path),
            "a YAML mapping",
            "write one key per line, such as `vectors: folder`",
        )
    return value
