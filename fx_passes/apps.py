"""Apps: a named list of reads and writes with the tensors and token sets they use."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import Field
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.app_functions import check_function, check_meaning
from eyesplice.fx_passes.app_tensors import (
    HOLDERS,
    MAX_TENSOR_BYTES,
    check_tensor,
    check_uses,
    decode,
    digest,
    encode,
)
from eyesplice.fx_passes.builder import Function
from eyesplice.fx_passes.models import StrictModel, validate
from eyesplice.fx_passes.plain import plain
from eyesplice.fx_passes.token_sets import check_token_set
from eyesplice.ops.layout import MAX_FUNCTIONS

MAX_TENSORS: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_RESERVED: Final = ("off", "__metadata__")


class AppModel(StrictModel):
    """An app as YAML or JSON states it; `tensors` is a file's name or their values."""

    name: str = Field(description="a string")
    functions: list[Any] = Field(
        min_length=1,
        max_length=MAX_FUNCTIONS,
        description=f"a list of 1 to {MAX_FUNCTIONS} functions",
    )
    tensors: Any = None
    token_sets: dict[str, Any] = Field(
        {}, description="an object of token sets by name"
    )


class App:
    """Reads and writes under one name, checked as far as that needs no model.

    Apps are equal when their contents are, values of tensors included.

    Attributes:
        name: what requests call it.
        tensors: dense CPU tensors by name, the app's own copies.
        token_sets: each a list of ids, or an object of one rule.
        digest: hash of everything in it, "sha256:...".
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Function | Mapping[str, Any]],
        tensors: Mapping[str, Tensor] | None = None,
        token_sets: Mapping[str, Any] | None = None,
    ) -> None:
        """An app of these parts.

        Args:
            name: letters, digits, "_", "-" and ".", at most 64; not "off".
            functions: `eyesplice.read` and `eyesplice.write` results, or YAML entries.
            tensors: by name. Those given in a function itself are added as, for
                instance, "write0.vector": the first function's vector.
            token_sets: by name: a list of ids, {"decoded_endswith": text} or
                {"decoded_contains": text}.

        Raises:
            SpecError: anything that no model could serve; the message names the place.
        """
        self.name: Final = check_name("app", name)
        listed, given = _separate(_listed(functions))
        self.tensors: Final = _checked_tensors(
            _joined(_named(tensors, "tensors"), given)
        )
        self.token_sets: Final = _checked_token_sets(_named(token_sets, "token_sets"))
        self._functions: Final = tuple(
            _checked_function(entry, f"functions[{i}]", self.tensors)
            for i, entry in enumerate(listed)
        )
        _refuse_repeats(self._functions)
        check_meaning(self._functions, self.token_sets)

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """Each function as its YAML entry, with its tensors' names filled in."""
        return tuple(plain(entry, "functions") for entry in self._functions)

    @cached_property
    def digest(self) -> str:
        """Hash of the name, functions, token sets and tensors: "sha256:..."."""
        contents = {name: digest(tensor) for name, tensor in self.tensors.items()}
        text = json.dumps([self.outline(), contents], sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def outline(self) -> dict[str, Any]:
        """The app as YAML states it, less the key `tensors`."""
        result: dict[str, Any] = {"name": self.name}
        if self.token_sets:
            result["token_sets"] = plain(dict(self.token_sets), "token_sets")
        return result | {"functions": list(self.functions)}

    def to_dict(self) -> dict[str, Any]:
        """The app as a JSON object, tensors in base64."""
        tensors = {name: encode(tensor) for name, tensor in self.tensors.items()}
        return self.outline() | ({"tensors": tensors} if tensors else {})

    @classmethod
    def from_dict(cls, value: object) -> "App":
        """The app that `to_dict` wrote.

        Raises:
            SpecError: any other object.
        """
        model = validate(AppModel, plain(value, "app"), "app")
        encoded = {} if model.tensors is None else model.tensors
        if not isinstance(encoded, dict):
            raise SpecError(
                "app.tensors",
                encoded,
                "an object of tensors by name",
                "send the tensors themselves",
            )
        tensors = {name: decode(name, item) for name, item in encoded.items()}
        return cls(model.name, model.functions, tensors, model.token_sets)

    def save(self, folder: str | Path) -> None:
        """Write `app.yaml` and, if there are tensors, `tensors.safetensors`.

        Args:
            folder: made if it is not there.
        """
        from eyesplice.fx_passes.app_files import save

        save(self, Path(folder))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, App) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"App({self.name!r}, {len(self._functions)} functions, {self.digest[:15]})"
        )


def check_name(thing: str, name: object) -> str:
    """The name of an app, function, tensor or token set.

    Raises:
        SpecError: other characters, too long, or a name that means something else.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and name not in _RESERVED:
        return str.__str__(name)
    raise SpecError(
        f"name of {thing}",
        name,
        'at most 64 letters, digits, "_", "-" and ".", neither "-" nor "." first, not '
        + " or ".join(f'"{word}"' for word in _RESERVED),
        "choose another name",
    )


def _listed(functions: object) -> list[Any]:
    """The functions, not more than there may be."""
    if isinstance(functions, list | tuple) and 0 < len(functions) <= MAX_FUNCTIONS:
        return list(functions)
    raise SpecError(
        "functions",
        functions,
        f"a list of 1 to {MAX_FUNCTIONS} functions",
        "give the app's reads and writes as a list",
    )


def _separate(functions: list[Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """Entries in which every tensor has a name, and the tensors named here."""
    entries: list[Any] = []
    given: dict[str, Tensor] = {}
    for i, function in enumerate(functions):
        fields, held = function, {}
        if isinstance(function, Function):
            fields, held = dict(function.fields), dict(function.tensors)
        elif isinstance(function, Mapping):
            held = {
                key: value
                for key, value in function.items()
                if key in HOLDERS and isinstance(value, Tensor)
            }
            fields = dict(function)
        for field, tensor in held.items():
            kind = "read" if "read" in fields else "write"
            fields[field] = f"{kind}{i}.{field}"
            given[fields[field]] = tensor
        entries.append(fields)
    return entries, given


def _named(value: object, what: str) -> dict[str, Any]:
    """A mapping whose keys are names; an absent one is empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_TENSORS:
        raise SpecError(
            what,
            value,
            f"an object of at most {MAX_TENSORS} by name",
            f"give the {what} by name",
        )
    for name in value:
        check_name(what, name)
    return dict(value)


def _joined(
    tensors: Mapping[str, Tensor], given: dict[str, Tensor]
) -> dict[str, Tensor]:
    for name in given:
        if name in tensors:
            raise SpecError(
                "tensors", name, "one tensor of each name", f"rename the tensor {name}"
            )
    return {**tensors, **given}


def _checked_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    copies = {name: check_tensor(name, tensors[name]) for name in sorted(tensors)}
    size = sum(tensor.nbytes for tensor in copies.values())
    if size > MAX_TENSOR_BYTES:
        raise SpecError(
            "tensors",
            f"{size} bytes in all",
            f"at most {MAX_TENSOR_BYTES} bytes",
            "leave out tensors, or use a smaller dtype",
        )
    return MappingProxyType(copies)


def _checked_token_sets(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(
        {name: check_token_set(value[name], f"token_sets.{name}") for name in value}
    )


def _checked_function(
    value: Any, path: str, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    entry = check_function(value, path)
    if "name" in entry:
        check_name(path, entry["name"])
    check_uses(entry, tensors, path)
    return entry


def _refuse_repeats(functions: Iterable[Mapping[str, Any]]) -> None:
    """A function is called by its name or its number, so each must mean one."""
    seen: set[str] = set()
    for i, entry in enumerate(functions):
        name = entry.get("name")
        if name is None:
            continue
        if name in seen or name.isdigit():
            raise SpecError(
                f"functions[{i}].name",
                name,
                "a name of its own for each function, not a number",
                "rename the function",
            )
        seen.add(name)
