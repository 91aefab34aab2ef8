"""Where hooks reach the sites of a model that runs without a graph."""

from dataclasses import dataclass, field
from typing import Final, Literal

from eyesplice.fx_passes.report import SiteRow, SpliceReport
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.ops.layout import Stage

Side = Literal["input", "output"]

_NOT_FOUND: Final = "no module of the layer gives this value"


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a module takes or gives: `inline_` runs on it in place.

    Attributes:
        module: the module's path.
        side: which of the two it is.
        width: elements per token.
    """

    module: str
    side: Side
    width: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A residual add and RMSNorm in one module: `boundary_` runs in its place.

    Attributes:
        module: the module's path.
        weight_offset: the scale is `weight + weight_offset`.
        adds: whether it adds a branch to the stream; the first norm does not.
        width: elements per token.
    """

    module: str
    weight_offset: float
    adds: bool
    width: int


@dataclass(slots=True)
class Places:
    """What was found in one model.

    Attributes:
        norms: by boundary.
        values: by table and stage.
        missing: why a stage of a table has no place.
    """

    norms: dict[Table, Norm] = field(default_factory=dict)
    values: dict[tuple[Table, Stage], Value] = field(default_factory=dict)
    missing: dict[tuple[Table, Stage], str] = field(default_factory=dict)

    def refuse(self, table: Table, reason: str) -> None:
        """Take back what a boundary has, and say why."""
        self.norms.pop(table, None)
        for stage in Stage:
            self.values.pop((table, stage), None)
            self.missing[table, stage] = reason

    def keep(self, wanted: frozenset[Site]) -> None:
        """Forget what nobody wants."""
        stages = {site.table for site in wanted}
        tables = {table for table, _ in stages}
        self.norms = {t: norm for t, norm in self.norms.items() if t in tables}
        self.values = {k: value for k, value in self.values.items() if k in stages}

    def report(self, wanted: frozenset[Site]) -> SpliceReport:
        """The site table."""
        rows = tuple(self._row(site) for site in sorted(wanted))
        hooks = len(self.norms) + len(self.values)
        return SpliceReport(rows, 0, 0, num_hooks=hooks)

    def _row(self, site: Site) -> SiteRow:
        table, stage = site.table
        norm = self.norms.get(table)
        place: Norm | Value | None = self.values.get((table, stage))
        if norm is not None and (norm.adds or stage != Stage.BRANCH):
            place = norm
        if place is None:
            reason = self.missing.get((table, stage), _NOT_FOUND)
            return SiteRow(site, None, reason=reason)
        return SiteRow(site, "module", place.module, f"[tokens, {place.width}]")
