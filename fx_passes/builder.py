"""Declaring one read or write of an app, in Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.app_functions import check_function
from eyesplice.fx_passes.app_tensors import HOLDERS

_IN_PLACE: Final = "given"
"""Stands for the name of a tensor that was given itself, until an app names it."""


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """One read or write, as `eyesplice.read` and `eyesplice.write` make it.

    Immutable: each method returns another one.

    Attributes:
        fields: the keys of its YAML entry and their values.
        tensors: the tensors that were given in place of a name, by field.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def layers(self, *layers: Any) -> "Function":
        """At these decoder layers.

        Args:
            layers: ints (negative from the end), ranges, lists of them, "20-49", "all".

        Raises:
            SpecError: none of these.
        """
        if len(layers) != 1:
            return self._with(layers=list(layers))
        return self._with(layers=layers[0])

    def submodule(self, name: str) -> "Function":
        """At this value of each layer: a submodule's name or a TransformerLens one.

        Raises:
            SpecError: an unknown name.
        """
        return self._with(submodule=name)

    def cond(self, when: str | None = None, gate: str | None = None) -> "Function":
        """On tokens where `when` holds, and only while `gate` does.

        Args:
            when: a condition on the token, e.g. "generated"; None leaves it as it is.
            gate: a condition on what was read, e.g. "probe(layer=18) >= 0".

        Raises:
            SpecError: a condition that cannot be read.
        """
        given = {"when": when, "gate": gate}
        return self._with(**{k: v for k, v in given.items() if v is not None})

    def _with(self, **fields: Any) -> "Function":
        return _function({**self.fields, **fields}, self.tensors)


def read(kernel: str, **fields: Any) -> Function:
    """A read: what `kernel` makes of a value, for an answer or a gate.

    Args:
        kernel: capture, probe, dot, cosine, norm, sae, router, distance or tanh_cosine.
        fields: the keys of its YAML entry; a tensor may stand for its name.

    Raises:
        SpecError: an unknown kernel or field, or a value that the field does not take.
    """
    return _declared("read", kernel, fields)


def write(kernel: str, **fields: Any) -> Function:
    """A write: what `kernel` does to a value.

    Args:
        kernel: steering_vector, ablate, one_sided, clamp, affine, replace, mask,
            feature_clamp, router, or the name of an op of your own ("lib::op").
        fields: the keys of its YAML entry; a tensor may stand for its name.

    Raises:
        SpecError: an unknown kernel or field, or a value that the field does not take.
    """
    return _declared("write", kernel, fields)


def _declared(kind: str, kernel: str, fields: Mapping[str, Any]) -> Function:
    tensors = {key: value for key, value in fields.items() if isinstance(value, Tensor)}
    for key in tensors:
        if key not in HOLDERS:
            raise SpecError(
                key,
                "a tensor",
                f"tensors in the fields {', '.join(HOLDERS)}",
                f"give {key} in another form",
            )
    others = {key: value for key, value in fields.items() if key not in tensors}
    return _function({kind: kernel, **others}, tensors)


def _function(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Function:
    checked = check_function({**fields, **dict.fromkeys(tensors, _IN_PLACE)}, "")
    own = {key: value for key, value in checked.items() if key not in tensors}
    return Function(MappingProxyType(own), MappingProxyType(dict(tensors)))
