"""A small model's sites and vectors, as requests see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyesplice import SpecError
from eyesplice.fx_passes.context import Context, DeployedApp, TokenSet, VectorInfo
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site, Submodule

NUM_LAYERS = 4
HIDDEN = 24
HEADS_WIDTH = 16
NUM_EXPERTS = 8
RANK = 3


@dataclass
class Vectors:
    """A vector table over plain tensors; its bank has an all-zero row 0."""

    tensors: Mapping[str, Tensor]
    first_row: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row = 1
        for name, tensor in self.tensors.items():
            self.first_row[name] = row
            row += tensor.numel() // tensor.shape[-1]

    def bank(self, width: int = HIDDEN) -> Tensor:
        bank = torch.zeros(1, width)
        for tensor in self.tensors.values():
            rows = torch.zeros(tensor.numel() // tensor.shape[-1], width)
            rows[:, : tensor.shape[-1]] = tensor.reshape(len(rows), -1)
            bank = torch.cat([bank, rows])
        return bank

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def info(self, name: str) -> VectorInfo | None:
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        return VectorInfo(name, f"sha256:{name}", tuple(tensor.shape))

    def row(self, name: str, layer: int) -> int:
        tensor = self.tensors[name]
        per_layer = tensor[0].numel() // tensor.shape[-1] if tensor.ndim > 1 else 0
        return self.first_row[name] + layer * per_layer

    def rows(self, name: str, layer: int) -> tuple[int, int]:
        tensor = self.tensors[name]
        if tensor.ndim < 3:
            return self.first_row[name], tensor.numel() // tensor.shape[-1]
        return self.row(name, layer), tensor.shape[1]

    def squared_norm(self, name: str, layer: int) -> float:
        return float(self.at(name, layer).pow(2).sum())

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def mask_row(self, activate: tuple[int, ...], deactivate: tuple[int, ...]) -> int:
        mask = torch.zeros(NUM_EXPERTS)
        mask[list(activate)], mask[list(deactivate)] = 1, -1
        for name, tensor in self.tensors.items():
            if torch.equal(tensor, mask):
                return self.first_row[name]
        raise SpecError("mask", activate, "masks of apps", "put it in an app")

    def at(self, name: str, layer: int) -> Tensor:
        """float64 `[width]`."""
        tensor = self.tensors[name].double()
        return tensor if tensor.ndim == 1 else tensor[layer]


def vectors() -> Vectors:
    seed = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seed)

    mask = torch.zeros(NUM_EXPERTS)
    mask[[1, 4]], mask[6] = 1, -1
    return Vectors(
        {
            "pirate": randn(NUM_LAYERS, HIDDEN),
            "calm": 3 * randn(HIDDEN),
            "zero": torch.zeros(HIDDEN),
            "tiny": torch.full((HIDDEN,), 1e-30),
            "short": randn(NUM_LAYERS - 1, HIDDEN),
            "heads": randn(HEADS_WIDTH),
            "up": 0.3 * randn(RANK, HIDDEN),
            "down": 0.3 * randn(RANK, HIDDEN),
            "ups": 0.3 * randn(NUM_LAYERS, RANK, HIDDEN),
            "downs": 0.3 * randn(NUM_LAYERS, RANK, HIDDEN),
            "biases": randn(RANK),
            "layer_biases": randn(NUM_LAYERS, RANK),
            "expert_mask": mask,
            "guarded/v": randn(NUM_LAYERS, HIDDEN),
            "guarded/w": randn(HIDDEN),
            "guarded/weight": randn(HIDDEN),
            "guarded/vector": randn(HIDDEN),
        }
    )


GUARDED = DeployedApp(
    "guarded",
    (
        {"read": "probe", "name": "truth", "weight": "w", "bias": -0.3, "layers": [1]},
        {"read": "probe", "layers": [0], "over": "prompt"},
        {
            "write": "steering_vector",
            "vector": "v",
            "scale": 1.5,
            "layers": [2, 3],
            "when": "token_in(triggers) or generated",
            "gate": "truth >= 0 and probe(layer=0).mean < 2",
        },
        {"write": "clamp", "name": "soft", "lo": -1, "layers": 3},
    ),
)


def context(
    max_entries: int = 16, table: Vectors | None = None, **others: Any
) -> Context:
    """Boundaries and routers armed; heads at layer 0, missing at 1, not asked for after."""
    armed: dict[Site, str | None] = {
        Site(layer, name): None
        for layer in range(NUM_LAYERS)
        for name in (*BOUNDARY_SUBMODULES, "router.logits")
    }
    armed[Site(0, "attention.heads")] = None
    armed[Site(1, "attention.heads")] = "the value is inside a fused op"
    widths: dict[Submodule, int] = dict.fromkeys(BOUNDARY_SUBMODULES, HIDDEN)
    widths["attention.heads"] = HEADS_WIDTH
    widths["router.logits"] = NUM_EXPERTS
    fields: dict[str, Any] = {
        "vocab_size": 1000,
        "num_experts": NUM_EXPERTS,
        "experts_per_token": 2,
        "token_sets": {
            "guarded/triggers": TokenSet(3, "sha256:triggers"),
            "newlines": TokenSet(1, "sha256:newlines"),
        },
        "apps": {
            "guarded": GUARDED,
            "asleep": DeployedApp("asleep", (), enabled=False),
        },
    }
    return Context(
        NUM_LAYERS, armed, table or vectors(), max_entries, widths, **(fields | others)
    )
