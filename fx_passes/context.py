"""What a running model offers to requests: sites, vectors and room."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from eyesplice.fx_passes.sites import Site, Submodule


@dataclass(frozen=True, slots=True)
class VectorInfo:
    """A registered vector.

    Attributes:
        name: the name requests use.
        digest: hash of its content.
        layers: rows of a `[layers, width]` vector, None for a `[width]` one.
        width: elements per row.
    """

    name: str
    digest: str
    layers: int | None
    width: int


class VectorTable(Protocol):
    """The registered vectors and where they lie in the bank."""

    def names(self) -> Sequence[str]:
        """Names of every registered vector."""

    def info(self, name: str) -> VectorInfo | None:
        """The vector of this name, None if it is not registered."""

    def row(self, name: str, layer: int) -> int:
        """Bank row at `layer`, which a `[width]` vector ignores."""

    def squared_norm(self, name: str, layer: int) -> float:
        """|v|^2 at `layer` of the values that the bank stores."""


@dataclass(frozen=True, slots=True)
class Context:
    """What requests to one model can name.

    Attributes:
        num_layers: decoder layers.
        armed: None for each site that can be acted on, else the reason why a site that
            was asked for at start-up is missing; sites that were not are absent.
        vectors: the registered vectors.
        max_entries: entries that a program may have in one table.
        widths: elements per token at each submodule.
    """

    num_layers: int
    armed: Mapping[Site, str | None]
    vectors: VectorTable
    max_entries: int
    widths: Mapping[Submodule, int]
