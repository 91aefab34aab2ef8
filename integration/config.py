"""The user's configuration: the one object under `additional_config["eyesplice"]`."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import within
from eyesplice.fx_passes.sites import (
    BOUNDARY_SUBMODULES,
    SUBMODULES,
    Site,
    Submodule,
    parse_place,
    parse_submodule,
)
from eyesplice.ops.families import FAMILIES, FamilyName
from eyesplice.ops.layout import ALL_FAMILIES, Family

KEY: Final = "eyesplice"
PASS_NAME: Final = "eyesplice.splice_pass"
CONFIG_VARIABLE: Final = "EYESPLICE_CONFIG"

_LATER: Final = ("dose", "h_norms")

NO_FAMILY: Final = Family(0)

_ALWAYS: Final = Family.ADD | Family.RANK1 | Family.READ | Family.GATE | Family.CAPTURE
"""What is compiled in, unless the configuration says otherwise, besides what apps need."""


class EyespliceConfig(BaseModel):
    """What a deployment switches on.

    Attributes:
        apps: folders or files of apps, or one of them.
        default: the app, or apps, of requests that name none.
        vectors: folder of steering vectors (.safetensors, .pt).
        sites: submodules to arm, as names, TransformerLens aliases or objects with
            `submodule` and `layers`; "all" for every submodule; "apps" for what the apps
            need and no more. Default: the seven values of each residual-stream
            boundary, and what the apps need.
        ops: op families to compile in, or "all". Default: what the apps need, and
            add, rank1, reads, gates and capture.
        max_entries: entries that one program may have in one table.
        max_scores: scores that one program may keep.
        bank_rows: rows of the vector bank; a `[hidden]` tensor takes one, a
            `[layers, hidden]` tensor takes one per layer.
        capture_rows: rows of captured activations that wait to be copied to the host.
            Default: what 8 MiB hold, see `Deployment.capture_rows`.
        token_sets: token sets that apps may name by a rule over the vocabulary.
        on_error: what to do with a request that cannot be served as written: "reject"
            it, or serve it "unsteered" and say so in its answer.
        allow_registration: whether apps and vectors may be registered over HTTP.
        op_modules: modules that register ops of the user's own, imported in every process.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    apps: list[str] | str = []
    default: list[str] | str = []
    vectors: str | None = None
    sites: list[str | dict[str, Any]] | Literal["all", "apps"] | None = None
    ops: list[FamilyName] | Literal["all"] | None = None
    max_entries: int = Field(default=8, ge=1, le=64)
    max_scores: int = Field(default=32, ge=1, le=1024)
    bank_rows: int = Field(default=1024, ge=2, le=1_000_000)
    capture_rows: int | None = Field(default=None, ge=1, le=1_000_000)
    token_sets: int = Field(default=32, ge=1, le=4096)
    on_error: Literal["reject", "unsteered"] = "reject"
    allow_registration: bool = False
    op_modules: list[str] = []
    # Set by the plugin, never by the user: part of vLLM's compile-cache key.
    salt: str = ""

    @property
    def app_paths(self) -> tuple[str, ...]:
        """The apps to deploy, in order."""
        return _several(self.apps)

    @property
    def default_apps(self) -> tuple[str, ...]:
        """The apps of requests that name none, in order."""
        return _several(self.default)

    def families(self, needed: Family = NO_FAMILY) -> Family:
        """The op families to compile in.

        Args:
            needed: what the deployed apps use.
        """
        if self.ops is None:
            return _ALWAYS | needed
        if self.ops == "all":
            return ALL_FAMILIES
        chosen = NO_FAMILY
        for name in self.ops:
            chosen |= FAMILIES[name]
        return chosen

    @property
    def explicit_sites(self) -> bool:
        """Whether the user named the sites, so that a missing one is an error."""
        return isinstance(self.sites, list)

    def wanted(
        self,
        num_layers: int,
        num_experts: int,
        needed: Iterable[Site] = (),
    ) -> frozenset[Site]:
        """The sites to arm in a model of `num_layers` decoder layers.

        Args:
            num_layers: decoder layers of the model.
            num_experts: experts of a mixture layer, 0 for a dense model.
            needed: the sites of the deployed apps, armed unless `sites` names others.

        Raises:
            SpecError: a malformed site or a layer out of range.
        """
        chosen: set[Site] = set()
        match self.sites:
            case None:
                chosen |= _at(BOUNDARY_SUBMODULES, range(num_layers)) | set(needed)
            case "all":
                chosen |= every_site(num_layers, num_experts)
            case "apps":
                chosen |= set(needed)
            case _:
                for i, entry in enumerate(self.sites):
                    with within(f"sites[{i}]"):
                        chosen |= _entry(entry, num_layers)
        if not chosen:
            raise SpecError(
                "sites",
                self.sites,
                "at least one submodule, or apps that act somewhere",
                "name one, deploy an app, or leave the key out for the default",
            )
        # One value with two names: whoever arms one has armed the other.
        for site in list(chosen):
            if site.submodule == "residual.post" and site.layer + 1 < num_layers:
                chosen.add(Site(site.layer + 1, "residual.pre"))
            elif site.submodule == "residual.pre" and site.layer:
                chosen.add(Site(site.layer - 1, "residual.post"))
        return frozenset(chosen)


def every_site(num_layers: int, num_experts: int) -> frozenset[Site]:
    """The sites that a model of these sizes can have."""
    names = [s for s in SUBMODULES if num_experts or s != "router.logits"]
    return _at(names, range(num_layers))


def _several(value: list[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _at(submodules: Iterable[Submodule], layers: Iterable[int]) -> frozenset[Site]:
    return frozenset(Site(layer, name) for name in submodules for layer in layers)


def _entry(entry: str | dict[str, Any], num_layers: int) -> frozenset[Site]:
    """The sites of one entry; errors name its key, or nothing where it is a name."""
    if isinstance(entry, str):
        try:
            return _entry({"submodule": entry}, num_layers)
        except SpecError as error:
            raise SpecError("", entry, error.allowed, error.remedy) from None
    if unknown := set(entry) - {"submodule", "layers"}:
        raise SpecError(
            "",
            sorted(unknown),
            "the keys submodule and layers",
            "remove the other keys",
        )
    submodule = entry.get("submodule")
    everywhere = parse_submodule(submodule)[1] is None and "layers" not in entry
    layers = "all" if everywhere else entry.get("layers")
    name, numbers = parse_place(submodule, layers, num_layers)
    return _at((name,), numbers)


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
