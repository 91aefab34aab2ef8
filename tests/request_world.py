"""A small model's sites and vectors, as requests see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyesplice.fx_passes.request import Context, VectorInfo
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site, Submodule

NUM_LAYERS = 4
HIDDEN = 24
HEADS_WIDTH = 16


@dataclass
class Vectors:
    """A vector table over plain tensors; its bank has an all-zero row 0."""

    tensors: Mapping[str, Tensor]
    first_row: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row = 1
        for name, tensor in self.tensors.items():
            self.first_row[name] = row
            row += 1 if tensor.ndim == 1 else tensor.shape[0]

    def bank(self, width: int = HIDDEN) -> Tensor:
        bank = torch.zeros(1, width)
        for tensor in self.tensors.values():
            rows = torch.zeros(tensor.numel() // tensor.shape[-1], width)
            rows[:, : tensor.shape[-1]] = tensor
            bank = torch.cat([bank, rows])
        return bank

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def info(self, name: str) -> VectorInfo | None:
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        layers = None if tensor.ndim == 1 else tensor.shape[0]
        return VectorInfo(name, f"sha256:{name}", layers, tensor.shape[-1])

    def row(self, name: str, layer: int) -> int:
        offset = 0 if self.tensors[name].ndim == 1 else layer
        return self.first_row[name] + offset

    def squared_norm(self, name: str, layer: int) -> float:
        return float(self.at(name, layer).pow(2).sum())

    def at(self, name: str, layer: int) -> Tensor:
        """float64 `[width]`."""
        tensor = self.tensors[name].double()
        return tensor if tensor.ndim == 1 else tensor[layer]


def vectors() -> Vectors:
    seed = torch.Generator().manual_seed(0)
    return Vectors(
        {
            "pirate": torch.randn(NUM_LAYERS, HIDDEN, generator=seed),
            "calm": 3 * torch.randn(HIDDEN, generator=seed),
            "zero": torch.zeros(HIDDEN),
            "tiny": torch.full((HIDDEN,), 1e-30),
            "short": torch.randn(NUM_LAYERS - 1, HIDDEN, generator=seed),
            "heads": torch.randn(HEADS_WIDTH, generator=seed),
        }
    )


def context(max_entries: int = 16, table: Vectors | None = None) -> Context:
    """Every boundary armed; heads armed at layer 0, missing at 1, not requested after."""
    armed: dict[Site, str | None] = {
        Site(layer, name): None
        for layer in range(NUM_LAYERS)
        for name in BOUNDARY_SUBMODULES
    }
    armed[Site(0, "attention.heads")] = None
    armed[Site(1, "attention.heads")] = "the value is inside a fused op"
    widths: dict[Submodule, int] = dict.fromkeys(BOUNDARY_SUBMODULES, HIDDEN)
    widths["attention.heads"] = HEADS_WIDTH
    return Context(NUM_LAYERS, armed, table or vectors(), max_entries, widths)
