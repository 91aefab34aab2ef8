"""What the pass did, site by site, for people and for the front end."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from eyesplice.fx_passes.sites import Site, parse_submodule

Form = Literal["fused", "inline", "module"]


@dataclass(frozen=True, slots=True)
class SiteRow:
    """One site of one model.

    Attributes:
        site: the layer and submodule.
        form: how it is armed; None when it is missing.
        node: the name of the value in the graph before the splice, or the path of the
            module that gives it; "" when missing.
        shape: its shape per batch, such as "[s72, 576]", "" when missing.
        reason: why it is missing, None when it is armed.
        custom: the users' own ops that run there, in order.
    """

    site: Site
    form: Form | None
    node: str = ""
    shape: str = ""
    reason: str | None = None
    custom: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpliceReport:
    """The site table of one model, and the counts of what was inserted or hooked."""

    rows: tuple[SiteRow, ...]
    num_boundary_ops: int
    num_inline_ops: int
    num_custom_ops: int = 0
    num_hooks: int = 0

    @property
    def missing(self) -> tuple[SiteRow, ...]:
        """The wanted sites that could not be armed."""
        return tuple(row for row in self.rows if row.form is None)

    def to_json(self) -> str:
        """The report as JSON; `from_json` reads it back."""
        rows = [
            {**asdict(row), "site": [row.site.layer, row.site.submodule]}
            for row in self.rows
        ]
        return json.dumps({"rows": rows, "ops": self.counts}, indent=1)

    @property
    def counts(self) -> dict[str, int]:
        """How many ops of each kind were inserted."""
        return {
            "boundary": self.num_boundary_ops,
            "inline": self.num_inline_ops,
            "custom": self.num_custom_ops,
            "hooks": self.num_hooks,
        }

    @staticmethod
    def from_json(text: str) -> "SpliceReport":
        """Read what `to_json` wrote."""
        plain = json.loads(text)
        rows = []
        for row in plain["rows"]:
            layer, name = row.pop("site")
            submodule, _ = parse_submodule(name)
            custom = tuple(row.pop("custom"))
            rows.append(SiteRow(Site(layer, submodule), **row, custom=custom))
        ops = plain["ops"]
        counts = (ops[name] for name in ("boundary", "inline", "custom", "hooks"))
        return SpliceReport(tuple(rows), *counts)
