"""Names of the values a program can act on, and where each lives in the tables.

A site is a (layer, submodule) pair. Sites of one residual-stream boundary share a
program table and differ by stage:

    table    BRANCH (x)             STREAM (h)                            NORMED (y)
    pre[L]   mlp.post of L-1        residual.post of L-1, residual.pre    attention.pre
    mid[L]   attention.post of L    residual.mid of L                     mlp.pre of L

`pre[num_layers]` is the boundary at the final norm. The other sites own a table each.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from eyesplice._errors import SpecError
from eyesplice.ops.layout import Stage

Submodule = Literal[
    "residual.pre",
    "attention.pre",
    "attention.heads",
    "attention.post",
    "residual.mid",
    "mlp.pre",
    "router.logits",
    "mlp.post",
    "residual.post",
]

ALIASES: Final[dict[Submodule, str | None]] = {
    "residual.pre": "hook_resid_pre",
    "attention.pre": "ln1.hook_normalized",
    "attention.heads": "attn.hook_z",
    "attention.post": "hook_attn_out",
    "residual.mid": "hook_resid_mid",
    "mlp.pre": "ln2.hook_normalized",
    "router.logits": None,
    "mlp.post": "hook_mlp_out",
    "residual.post": "hook_resid_post",
}
"""Each submodule, in the order of the forward pass, with its TransformerLens name."""

SUBMODULES: Final[tuple[Submodule, ...]] = tuple(ALIASES)

BOUNDARY_SUBMODULES: Final[tuple[Submodule, ...]] = tuple(
    s for s in SUBMODULES if s not in ("attention.heads", "router.logits")
)
"""The seven values of a residual-stream boundary: the ones armed by default."""

_FROM_ALIAS: Final = {alias: name for name, alias in ALIASES.items() if alias}
_ALIAS: Final = re.compile(r"blocks\.(-?[0-9]{1,6}|\*)\.(.+)")

_ONE_LAYER: Final = re.compile(r"\s*-?[0-9]{1,6}\s*")
_LAYER_RANGE: Final = re.compile(r"\s*([0-9]{1,6})\s*-\s*([0-9]{1,6})\s*")

TableKind = Literal["pre", "mid", "heads", "router", "custom"]


@dataclass(frozen=True, order=True, slots=True)
class Table:
    """One program table: a boundary, or a single value away from the boundaries.

    `part` is not 0 in what users' own ops bring: their own tables, which it numbers, and
    the stages that they cut off a boundary.
    """

    kind: TableKind
    layer: int
    part: int = 0


@dataclass(frozen=True, order=True, slots=True)
class Site:
    """One value of one decoder layer."""

    layer: int
    submodule: Submodule

    @property
    def alias(self) -> str | None:
        """The hook point's TransformerLens name, None where it has none."""
        alias = ALIASES[self.submodule]
        return alias and f"blocks.{self.layer}.{alias}"

    @property
    def table(self) -> tuple[Table, Stage]:
        """The program table and stage that hold this site's entries."""
        match self.submodule:
            case "residual.pre":
                return Table("pre", self.layer), Stage.STREAM
            case "attention.pre":
                return Table("pre", self.layer), Stage.NORMED
            case "attention.heads":
                return Table("heads", self.layer), Stage.BRANCH
            case "attention.post":
                return Table("mid", self.layer), Stage.BRANCH
            case "residual.mid":
                return Table("mid", self.layer), Stage.STREAM
            case "mlp.pre":
                return Table("mid", self.layer), Stage.NORMED
            case "mlp.post":
                return Table("pre", self.layer + 1), Stage.BRANCH
            case "residual.post":
                return Table("pre", self.layer + 1), Stage.STREAM
            case "router.logits":
                return Table("router", self.layer), Stage.BRANCH

    def __str__(self) -> str:
        return f"{self.submodule}[{self.layer}]"


def parse_submodule(text: object) -> tuple[Submodule, int | None]:
    """A submodule name or a TransformerLens alias, which may carry a layer.

    Returns:
        The submodule, and the alias's layer (None for a plain name or `blocks.*`).

    Raises:
        SpecError: neither a submodule nor an alias.
    """
    if isinstance(text, str):
        for name in SUBMODULES:
            if text == name:
                return name, None
        if found := _ALIAS.fullmatch(text):
            layer, point = found.groups()
            if point in _FROM_ALIAS:
                return _FROM_ALIAS[point], None if layer == "*" else int(layer)
    raise SpecError(
        "submodule",
        text,
        ", ".join(SUBMODULES)
        + ", or a TransformerLens name (blocks.L.hook_resid_post)",
        "use one of these names",
    )


def parse_place(
    submodule: object, layers: object, num_layers: int
) -> tuple[Submodule, tuple[int, ...]]:
    """The submodule and the ascending layers that two keys state together.

    Args:
        submodule: a name, or an alias that may carry a layer.
        layers: see `parse_layers`; may be None beside an alias that carries one.
        num_layers: decoder layers of the model.

    Raises:
        SpecError: unknown, out of range, or layers beside an alias that names another.
    """
    name, own = parse_submodule(submodule)
    if own is None:
        return name, parse_layers(layers, num_layers)
    if not -num_layers <= own < num_layers:
        raise SpecError(
            "submodule",
            submodule,
            f"blocks.0 to blocks.{num_layers - 1}, or blocks.-{num_layers} to blocks.-1",
            f"name a layer of this model, which has {num_layers}",
        )
    own %= num_layers
    if layers is not None and parse_layers(layers, num_layers) != (own,):
        raise SpecError(
            "layers",
            layers,
            f"{own}, the layer that {submodule} names",
            "leave layers out, or use blocks.*",
        )
    return name, (own,)


def parse_layers(value: object, num_layers: int) -> tuple[int, ...]:
    """Layers as ints, ranges, lists, "all", "20-49" or negatives from the end.

    Returns:
        Ascending layer numbers without repeats.

    Raises:
        SpecError: malformed, empty, or a layer out of range.
    """
    return tuple(sorted(set(_layers(value, num_layers))))


def _layers(value: object, num_layers: int) -> Iterable[int]:
    match value:
        case bool() | None:
            pass
        case int():
            return [_layer(value, num_layers)]
        case "all":
            return range(num_layers)
        case str() if found := _LAYER_RANGE.fullmatch(value):
            first, last = (_layer(int(text), num_layers) for text in found.groups())
            if first <= last:
                return range(first, last + 1)
        case str() if _ONE_LAYER.fullmatch(value):
            return [_layer(int(value), num_layers)]
        case range() | list() | tuple() if value and not value[4 * num_layers :]:
            return [layer for item in value for layer in _one_level(item, num_layers)]
    raise SpecError(
        "layers",
        value,
        f'an int, a list of ints, "all" or a range "A-B", within 0..{num_layers - 1}',
        "name the decoder layers to act on",
    )


def _one_level(item: object, num_layers: int) -> Iterable[int]:
    """An item of a list of layers; lists do not nest."""
    if isinstance(item, list | tuple):
        return _layers(None, num_layers)
    return _layers(item, num_layers)


def _layer(value: int, num_layers: int) -> int:
    if -num_layers <= value < num_layers:
        return value % num_layers
    raise SpecError(
        "layers",
        value,
        f"0..{num_layers - 1}, or -{num_layers}..-1 from the end",
        f"name a layer of this model, which has {num_layers}",
    )
