"""What a running model offers to requests: sites, tensors, apps and room."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from eyesplice.fx_passes.custom_sites import NO_CUSTOM_SITES, CustomSites
from eyesplice.fx_passes.sites import Site, Submodule
from eyesplice.ops.layout import ALL_FAMILIES, INT32_MAX, Family


@dataclass(frozen=True, slots=True)
class VectorInfo:
    """A registered tensor; those of an app are registered as `app/tensor`.

    Attributes:
        name: the name requests use.
        digest: hash of its content.
        shape: `[width]`, `[layers, width]` or `[rows, width]`, `[layers, rows, width]`.
    """

    name: str
    digest: str
    shape: tuple[int, ...]

    @property
    def layers(self) -> int | None:
        """Length of its first axis if it has more than one axis, else None."""
        return self.shape[0] if len(self.shape) > 1 else None

    @property
    def width(self) -> int:
        """Elements per row."""
        return self.shape[-1]


class VectorTable(Protocol):
    """The registered tensors and where they lie in the bank.

    A tensor's rows lie one after the other, in the order of its axes. Whether the first
    axis of a `[n, width]` tensor counts layers or rows is for the kernel to say that
    uses it.
    """

    def names(self) -> Sequence[str]:
        """Names of every registered tensor."""

    def info(self, name: str) -> VectorInfo | None:
        """The tensor of this name, None if it is not registered."""

    def row(self, name: str, layer: int) -> int:
        """First bank row at index `layer` of the first axis.

        A `[width]` tensor has one row and ignores `layer`.
        """

    def rows(self, name: str, layer: int) -> tuple[int, int]:
        """First bank row and number of rows at `layer` of a tensor of several rows.

        All rows of a `[rows, width]` tensor, the one of a `[width]` one, those of
        `layer` of a `[layers, rows, width]` one.
        """

    def squared_norm(self, name: str, layer: int) -> float:
        """|v|^2 of bank row `row(name, layer)`, of the values that the bank stores."""

    def tensor(self, name: str) -> Tensor:
        """The values that the bank stores, of the shape of `info`, on the CPU."""

    def mask_row(self, activate: tuple[int, ...], deactivate: tuple[int, ...]) -> int:
        """Bank row that holds 1 at experts to activate, -1 at those to deactivate.

        Raises:
            SpecError: the bank has no such row and can make none now.
        """


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A named set of token ids on the device.

    Attributes:
        row: its row of `token_sets`.
        digest: hash of its ids.
    """

    row: int
    digest: str


@dataclass(frozen=True, slots=True)
class DeployedApp:
    """An app that requests can name.

    Attributes:
        name: its name.
        functions: its entries, plain values of a valid app file.
        enabled: whether requests may use it now.
    """

    name: str
    functions: tuple[dict[str, Any], ...]
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Context:
    """What requests to one model can name.

    Attributes:
        num_layers: decoder layers.
        armed: None for each site that can be acted on, else the reason why a site that
            was asked for at start-up is missing; sites that were not are absent.
        vectors: the registered tensors.
        max_entries: entries that a program may have in one table.
        widths: elements per token at each submodule.
        max_scores: scores that a program may have.
        vocab_size: token ids are smaller than this.
        families: op families compiled in.
        token_sets: named token sets; those of an app are named `app/set`.
        apps: the deployed apps by name.
        default_apps: apps of requests that name none; disabled ones are passed over.
        num_experts: experts of a mixture layer, 0 for a dense model.
        experts_per_token: experts that each token goes to.
        custom: the users' own ops of the deployed apps.
    """

    num_layers: int
    armed: Mapping[Site, str | None]
    vectors: VectorTable
    max_entries: int
    widths: Mapping[Submodule, int]
    max_scores: int = 32
    vocab_size: int = INT32_MAX
    families: Family = ALL_FAMILIES
    token_sets: Mapping[str, TokenSet] = field(default_factory=dict)
    apps: Mapping[str, DeployedApp] = field(default_factory=dict)
    default_apps: tuple[str, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    custom: CustomSites = NO_CUSTOM_SITES
