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
    """

    site: Site
    form: Form | None
    node: str = ""
    shape: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SpliceReport:
    """The site table of one model, and the counts of what was inserted or hooked."""

    rows: tuple[SiteRow, ...]
    num_boundary_ops: int
    num_inline_ops: int
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
        counts = {
            "boundary": self.num_boundary_ops,
            "inline": self.num_inline_ops,
            "hooks": self.num_hooks,
        }
        return json.dumps({"rows": rows, "ops": counts}, indent=1)

    @staticmethod
    def from_json(text: str) -> "SpliceReport":
        """Read what `to_json` wrote."""
        plain = json.loads(text)
        rows = []
        for row in plain["rows"]:
            layer, name = row.pop("site")
            submodule, _ = parse_submodule(name)
            rows.append(SiteRow(Site(layer, submodule), **row))
        ops = plain["ops"]
        return SpliceReport(tuple(rows), ops["boundary"], ops["inline"], ops["hooks"])
