"""The order in which a forward pass reaches the values that programs act on."""

from typing import Final, NamedTuple

from eyesplice.fx_passes.sites import SUBMODULES, Site, Table, TableKind
from eyesplice.ops.layout import Stage

_KINDS: Final[tuple[TableKind, ...]] = tuple(
    dict.fromkeys(Site(0, submodule).table[0].kind for submodule in SUBMODULES)
)
"""The tables of one layer number, in the order in which they run."""


class Place(NamedTuple):
    """Where a site's entries stand; places compare in the order of the forward pass.

    Attributes:
        layer: of the table.
        kind: index of the table's kind.
        stage: of the entries.
        turn: 1 for `residual.pre`, which follows `residual.post` of the layer before
            though it is the same value; else 0.
    """

    layer: int
    kind: int
    stage: Stage
    turn: int

    @property
    def launch(self) -> tuple[int, int]:
        """The table's place: of two tables, the lesser has run when the other begins."""
        return self.layer, self.kind

    @property
    def table(self) -> Table:
        """The table that holds the entries."""
        return Table(_KINDS[self.kind], self.layer)


def place_of(site: Site) -> Place:
    """The place of a site's entries."""
    table, stage = site.table
    turn = int(site.submodule == "residual.pre")
    return Place(table.layer, _KINDS.index(table.kind), stage, turn)
