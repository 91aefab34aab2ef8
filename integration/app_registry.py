"""The apps of a deployment: loaded, put into the tables, and what they need of a model."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.app_files import load_app
from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.context import Context, DeployedApp, TokenSet
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.sites import Site, Submodule, parse_submodule
from eyesplice.fx_passes.token_sets import resolve_all
from eyesplice.integration.config import KEY, NO_FAMILY
from eyesplice.integration.vectors import VectorRegistry
from eyesplice.ops.layout import Family

_WORD_BITS: Final = 32


class AppRegistry:
    """Apps by name, in the order in which the configuration lists them."""

    def __init__(self, apps: Iterable[App]) -> None:
        """The apps of one deployment.

        Raises:
            SpecError: two apps of one name.
        """
        self._apps: dict[str, App] = {}
        for app in apps:
            if app.name in self._apps:
                raise SpecError(
                    "apps", app.name, "one app of each name", "rename one of the two"
                )
            self._apps[app.name] = app

    @classmethod
    def load(cls, paths: Iterable[str]) -> "AppRegistry":
        """The apps in these folders and files.

        Raises:
            SpecError: one that cannot be read, or two of one name.
        """
        return cls(load_app(path) for path in paths)

    @property
    def names(self) -> tuple[str, ...]:
        """The apps' names."""
        return tuple(self._apps)

    def __getitem__(self, name: str) -> App:
        return self._apps[name]

    def __iter__(self) -> Iterator[App]:
        return iter(self._apps.values())

    def check_defaults(self, names: Sequence[str]) -> None:
        """Refuse a default that is not deployed.

        Raises:
            SpecError: such a name, or one that is given twice.
        """
        for place, name in enumerate(names):
            if name not in self._apps:
                raise SpecError(
                    "default",
                    name,
                    f"deployed apps: {', '.join(self._apps) or 'none'}",
                    "name one of them, or add its folder to `apps`",
                )
            if name in names[:place]:
                raise SpecError(
                    "default", name, "each app once", "leave the second one out"
                )

    def submodules(self) -> frozenset[Submodule]:
        """Every submodule that a function acts on."""
        return frozenset(submodule_of(entry) for app in self for entry in app.functions)

    def register(self, registry: VectorRegistry) -> None:
        """Add the apps' tensors, as `app/tensor`.

        Raises:
            SpecError: a tensor that does not fit into the bank.
        """
        for app in self:
            for name in sorted(app.tensors):
                registry.add(f"{app.name}/{name}", app.tensors[name])

    def token_sets(self) -> dict[str, Any]:
        """Every app's token sets, as `app/set`: ids or a rule."""
        return {
            f"{app.name}/{name}": app.token_sets[name]
            for app in self
            for name in sorted(app.token_sets)
        }

    def deployed(self, disabled: Iterable[str] = ()) -> dict[str, DeployedApp]:
        """The apps as requests see them."""
        off = frozenset(disabled)
        return {
            app.name: DeployedApp(app.name, app.functions, app.name not in off)
            for app in self
        }


def submodule_of(entry: Mapping[str, Any]) -> Submodule:
    """Where a function of an app acts.

    Raises:
        SpecError: an unknown name.
    """
    if "submodule" in entry:
        return parse_submodule(entry["submodule"])[0]
    routes = "router" in (entry.get("read"), entry.get("write"))
    return "router.logits" if routes else "residual.post"


@dataclass(frozen=True, slots=True)
class Needs:
    """What the deployed apps need of the engine.

    Attributes:
        sites: the sites that their functions act on.
        families: the op families that they use.
        functions: the names of each app's functions, as answers have them.
    """

    sites: frozenset[Site] = frozenset()
    families: Family = NO_FAMILY
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, apps: AppRegistry, context: Context) -> "Needs":
        """What each app becomes as the one app of a request.

        Router masks that are not in the bank yet are added to it.

        Raises:
            SpecError: an app that this model cannot serve.
        """
        sites: set[Site] = set()
        families = NO_FAMILY
        functions: dict[str, tuple[str, ...]] = {}
        for name in apps.names:
            request = parse_request({KEY: {"apps": {name: {}}}}, context)
            assert request is not None
            program = lower(request, context)
            families |= program.families
            functions[name] = tuple(info.name for info in program.functions)
            for info in program.functions:
                sites |= {Site(layer, info.submodule) for layer in info.layers}
        return cls(frozenset(sites), families, functions)


class TokenSets:
    """The named token sets of a deployment, a row of the device's table each."""

    def __init__(
        self, ids: Mapping[str, Sequence[int]], rows: int, vocab_size: int
    ) -> None:
        """Sets of ids below `vocab_size`.

        Raises:
            SpecError: more sets than rows.
        """
        if len(ids) > rows:
            raise SpecError(
                "token sets of the apps",
                len(ids),
                f"at most {rows}",
                "raise token_sets in the configuration or remove apps",
            )
        self._ids = dict(ids)
        self._shape = rows, -(-vocab_size // _WORD_BITS)

    @classmethod
    def resolve(
        cls,
        token_sets: Mapping[str, Any],
        rows: int,
        vocab_size: int,
        model_config: Any,
    ) -> "TokenSets":
        """The sets with their rules applied to the model's vocabulary.

        Args:
            token_sets: ids or a rule, by name.
            rows: sets that there is room for.
            vocab_size: token ids are 0 to vocab_size - 1.
            model_config: vLLM's, asked for the tokenizer if a rule needs one.

        Raises:
            SpecError: an id out of range, a rule that no token fits, no tokenizer, or
                more sets than rows.
        """
        by_rule = [
            name for name, value in token_sets.items() if isinstance(value, dict)
        ]
        tokenizer = _tokenizer(by_rule[0], model_config) if by_rule else None
        return cls(resolve_all(token_sets, tokenizer, vocab_size), rows, vocab_size)

    def copy(self) -> "TokenSets":
        """The same sets, which go their own way from here."""
        twin = copy(self)
        twin._ids = dict(self._ids)
        return twin

    def named(self) -> dict[str, TokenSet]:
        """Each set's row and the hash of its ids."""
        return {
            name: TokenSet(row, _digest(ids))
            for row, (name, ids) in enumerate(self._ids.items())
        }

    def rows(self) -> Tensor:
        """int32 `[rows, ceil(vocabulary / 32)]` on the CPU, a bit per token id."""
        words = np.zeros(self._shape, dtype=np.uint32)
        for row, ids in enumerate(self._ids.values()):
            place = np.asarray(ids, dtype=np.int64)
            bits = np.uint32(1) << (place % _WORD_BITS).astype(np.uint32)
            np.bitwise_or.at(words[row], place // _WORD_BITS, bits)
        return torch.from_numpy(words.view(np.int32))


def _digest(ids: Sequence[int]) -> str:
    return "sha256:" + hashlib.sha256(str(tuple(ids)).encode()).hexdigest()


def _tokenizer(name: str, model_config: Any) -> Any:
    remedy = "list token ids in the app instead of a rule"
    if model_config.skip_tokenizer_init:
        raise SpecError(
            f"token set {name}",
            "a rule over decoded tokens",
            "token ids: this engine has no tokenizer (skip_tokenizer_init)",
            remedy,
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model_config.tokenizer,
            revision=model_config.tokenizer_revision,
            trust_remote_code=model_config.trust_remote_code,
        )
    # Tokenizers of one's own fail in their own ways.
    except Exception as error:
        raise SpecError(
            f"token set {name}",
            f"a rule, and the tokenizer {model_config.tokenizer}",
            "a tokenizer that transformers can load",
            f"{remedy} ({type(error).__name__}: {error})",
        ) from error
