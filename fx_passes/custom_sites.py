"""A deployment's users' own ops: at which site each one runs, and what makes room.

A boundary is one op, `boundary_`, which runs all three stages of its table. A user's op
on x or h has to stand between them, so it cuts the boundary: what programs do at x, or at
x and h, then stands in tables of their own, run by `inline_` before the op, and the
boundary's own table keeps the rest. Parts of table `mid[3]`:

    own op at    BRANCH (x)   STREAM (h)   NORMED (y)
    x            part 1       part 0       part 0
    h            part 1       part 2       part 0
    y            part 0       part 0       part 0

Values that are not part of a boundary have one stage, and nothing to cut.
"""

from collections.abc import Container, Iterator, Set
from dataclasses import dataclass
from typing import Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.order import place_of
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.ops.layout import Stage

_BOUNDARIES: Final = ("pre", "mid")


@dataclass(frozen=True, order=True, slots=True)
class CustomSite:
    """One user's own op at one site of one function of a deployed app.

    Attributes:
        number: its place among those of the deployment.
        site: where it runs.
        op: its name, "lib::op".
        schema: what the op's registration says of its arguments.
        app: the app whose function it is.
        weight: the registered name of its tensor, None if it has none.
        rows: rows of the tensor at each layer, 0 if it has none.
    """

    number: int
    site: Site
    op: str
    schema: str
    app: str
    weight: str | None
    rows: int

    @property
    def table(self) -> Table:
        """The table of the entries that say on which tokens it acts."""
        return Table("custom", self.site.table[0].layer, self.number)

    @property
    def shape(self) -> tuple[str, ...]:
        """What of it shapes the graph; the values of the tensor do not."""
        return str(self.number), str(self.site), self.schema, str(self.rows)


@dataclass(frozen=True, slots=True)
class CustomSites:
    """Every user's own op of a deployment, in order."""

    all: tuple[CustomSite, ...] = ()

    def __iter__(self) -> Iterator[CustomSite]:
        return iter(self.all)

    def at(self, table: Table, stage: Stage) -> tuple[CustomSite, ...]:
        """The ops on one value, in the order in which they run.

        `residual.post` of a layer comes before `residual.pre` of the next.
        """
        found = [custom for custom in self.all if custom.site.table == (table, stage)]
        return tuple(sorted(found, key=lambda c: (place_of(c.site), c.number)))

    def free(
        self,
        op: str,
        weight: str | None,
        site: Site,
        app: str | None,
        taken: Container[Table],
    ) -> CustomSite:
        """The first that does what a function does at a site.

        Args:
            op, weight, site: what and where.
            app: the app whose own it must be; None for a request's own function, which
                takes any.
            taken: tables that other functions of the program have.

        Raises:
            SpecError: there is none.
        """
        here = [custom for custom in self.all if custom.site == site]
        for custom in here:
            alike = (custom.op, custom.weight) == (op, weight)
            if alike and app in (None, custom.app) and custom.table not in taken:
                return custom
        there = sorted({f"{_use(c.op, c.weight)} of {c.app}" for c in here})
        raise SpecError(
            "write",
            f"{_use(op, weight)} at {site}",
            "the ops of deployed apps at this site, each once: "
            + (", ".join(there) or "none"),
            "put it into an app and restart the engine with it",
        )

    def cut(self, table: Table) -> Set[Stage]:
        """The stages of a boundary that run before it, in tables of their own."""
        if table.kind not in _BOUNDARIES:
            return frozenset()
        if self.at(table, Stage.STREAM):
            return frozenset({Stage.BRANCH, Stage.STREAM})
        return frozenset({Stage.BRANCH} if self.at(table, Stage.BRANCH) else ())

    def table_of(self, table: Table, stage: Stage) -> Table:
        """The table that holds the entries of one stage of `table`."""
        part = 1 + stage if stage in self.cut(table) else 0
        return Table(table.kind, table.layer, part)

    def tables(self, table: Table) -> tuple[Table, ...]:
        """`table` and the tables that it is cut into."""
        return (
            table,
            *(self.table_of(table, stage) for stage in sorted(self.cut(table))),
        )


def _use(op: str, weight: str | None) -> str:
    return f"{op} ({weight or 'no tensor'})"


NO_CUSTOM_SITES: Final = CustomSites()
