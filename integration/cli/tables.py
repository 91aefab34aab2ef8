"""The site table, in short (one line per submodule) and in full (one per site)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from rich.markup import escape
from rich.table import Table
from rich.text import Text

_STYLES: Final[dict[str | None, str]] = {
    "fused": "green",
    "inline": "cyan",
    "module": "yellow",
    None: "red",
}
_NUMBER: Final = re.compile(r"[0-9]+")
_TOKEN_SYMBOL: Final = re.compile(r"\[[su][0-9]+")


@dataclass(frozen=True, slots=True)
class SiteLine:
    """One site as an engine's process reported it."""

    layer: int
    submodule: str
    alias: str | None
    form: str | None
    node: str | None
    shape: str | None
    reason: str | None
    custom: Sequence[str] = ()

    @property
    def readable_shape(self) -> str:
        """The shape with the number of tokens called so: "[tokens, 576]"."""
        return _TOKEN_SYMBOL.sub("[tokens", self.shape or "")


@dataclass(frozen=True, slots=True)
class Group:
    """Sites of one submodule that the pass treated alike."""

    lines: tuple[SiteLine, ...]

    @property
    def first(self) -> SiteLine:
        """A representative."""
        return self.lines[0]

    @property
    def layers(self) -> str:
        """The layers, such as "0-29" or "0-3, 7"."""
        return ranges(line.layer for line in self.lines)


def site_lines(found: Mapping[str, Any]) -> list[SiteLine]:
    """The sites of what an engine's process found."""
    return [SiteLine(**site) for site in found["sites"]]


def groups(lines: Iterable[SiteLine]) -> list[Group]:
    """Group sites by submodule, form, own ops, shape and reason.

    Reasons that differ only in numbers, such as the layer's, count as one. Submodules
    keep the order in which they first appear.
    """
    found: dict[tuple[object, ...], list[SiteLine]] = {}
    order: dict[str, int] = {}
    for line in lines:
        order.setdefault(line.submodule, len(order))
        reason = line.reason and _NUMBER.sub("N", line.reason)
        own = tuple(line.custom)
        key = (line.submodule, line.form, own, line.readable_shape, reason)
        found.setdefault(key, []).append(line)
    grouped = [Group(tuple(members)) for members in found.values()]
    return sorted(grouped, key=lambda group: order[group.first.submodule])


def ranges(layers: Iterable[int]) -> str:
    """Ascending numbers as ranges: "0-3, 7"."""
    runs = groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])
    spans = ([number for _, number in run] for _, run in runs)
    return ", ".join(
        str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans
    )


def short_table(lines: Sequence[SiteLine]) -> Table:
    """One row per group; fits 80 columns."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("site", "layers", "form", "shape", "TransformerLens name"):
        table.add_column(name, overflow="fold")
    for group in groups(lines):
        first = group.first
        alias = re.sub(r"blocks\.[0-9]+", "blocks.L", first.alias or "")
        shape = escape(first.readable_shape)
        table.add_row(first.submodule, group.layers, _form(first), shape, alias)
    return table


def full_table(lines: Iterable[SiteLine]) -> Table:
    """One row per site, with its node or why it is missing."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (
        "site",
        "form",
        "shape",
        "node, or why missing",
        "TransformerLens name",
    ):
        table.add_column(name, overflow="fold")
    for line in lines:
        site = escape(f"{line.submodule}[{line.layer}]")
        what = escape(line.node or line.reason or "")
        table.add_row(
            site, _form(line), escape(line.readable_shape), what, line.alias or ""
        )
    return table


def missing_notes(lines: Iterable[SiteLine]) -> list[str]:
    """Why sites are missing, one sentence per group."""
    return [
        f"{group.first.submodule}, layers {group.layers}: {group.first.reason}"
        for group in groups(lines)
        if group.first.form is None
    ]


def count_note(found: Mapping[str, Any]) -> str:
    """How many sites and ops there are, in one sentence."""
    total, ops = len(found["sites"]), found["ops"]
    own = f", with {n} ops of your own" if (n := ops.get("custom")) else ""
    return (
        f"{total - found['missing']} of {total} sites armed by {ops['boundary']} "
        f"boundary ops, {ops['inline']} inline ops and {ops['hooks']} hooks{own}"
    )


def _form(line: SiteLine) -> Text:
    own = "".join(f" + {op}" for op in line.custom)
    return Text((line.form or "missing") + own, style=_STYLES.get(line.form, ""))
