"""Random reads and writes on registered vectors, with the hooks that do the same."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from tests import functions as f
from tests import oracle as judge
from tests.oracle import Edit
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS

LISTED: Final = list(range(3, 512, 23))
"""The tokens of prompts and of `token_in`, few so that they meet."""

RANK: Final = 3


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(23)

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(*shape, generator=generator)

    rows = {f"v{i}": normal(HIDDEN_SIZE) for i in range(6)}
    return rows | {
        "layered": normal(NUM_LAYERS, HIDDEN_SIZE),
        "u": 2 * normal(RANK, HIDDEN_SIZE),
        "v": normal(RANK, HIDDEN_SIZE) / 4,
        "b": 2 * normal(RANK),
        "encoder": normal(RANK, HIDDEN_SIZE),
    }


TENSORS: Final = _tensors()


@dataclass
class Margins:
    """How near to a jump the values of a run came."""

    found: list[float] = field(default_factory=list)

    def note(self, values: Tensor, jump: float) -> None:
        """Remember the nearest of the values, NaN left out."""
        known = values[~values.isnan()]
        if len(known):
            self.found.append(float((known - jump).abs().min()))

    def clear(self) -> None:
        """Forget them."""
        self.found.clear()

    @property
    def least(self) -> float:
        """The nearest of all."""
        return min(self.found, default=torch.inf)


def _row(rng: random.Random, layers: Sequence[int]) -> tuple[str, Tensor]:
    """The name of a vector and its row at the layers; one per layer only at one."""
    if len(layers) == 1 and rng.random() < 0.15:
        return "layered", TENSORS["layered"][layers[0]]
    name = f"v{rng.randrange(6)}"
    return name, TENSORS[name]


def _number(rng: random.Random, size: float) -> float:
    return round(rng.uniform(-size, size), 2)


# Reads.


def read_row(
    rng: random.Random, layers: Sequence[int], margins: Margins
) -> tuple[dict[str, Any], f.ReadRow, int | None]:
    """A read's own keys, its score, and its number of features if it is an sae."""
    kernel = rng.choice(
        ("probe", "probe", "dot", "cosine", "norm", "distance", "tanh_cosine", "sae")
    )
    entry: dict[str, Any] = {"read": kernel}
    if kernel == "norm":
        return entry, f.norm(), None
    if kernel == "sae":
        return *_sae(rng, entry, margins), RANK
    entry["weight"], w = _row(rng, layers)
    if kernel == "probe":
        bias, sigmoid = _number(rng, 1), rng.random() < 0.3
        entry |= {"bias": bias} | ({"function": "sigmoid"} if sigmoid else {})
        return entry, f.probe(w, bias, sigmoid), None
    if kernel == "tanh_cosine":
        return entry, _noted(f.tanh_cosine(w), w, margins), None
    rows = {"dot": f.probe, "cosine": f.cosine, "distance": f.distance_to}
    return entry, rows[kernel](w), None


def _noted(row: f.ReadRow, w: Tensor, margins: Margins) -> f.ReadRow:
    """The read; its direction turns over where w.h changes its sign."""

    def fn(h: Tensor) -> Tensor:
        margins.note(h @ w, 0.0)
        return row(h)

    return fn


def _sae(
    rng: random.Random, entry: dict[str, Any], margins: Margins
) -> tuple[dict[str, Any], f.ReadRow]:
    bias: Any = rng.choice((0.0, 0.2, "b"))
    number = TENSORS["b"] if bias == "b" else bias
    entry |= {"weight": "encoder", "bias": bias}
    encoder = TENSORS["encoder"]
    kind = rng.choice(("relu", "identity", "jump_relu"))
    entry["function"] = kind
    if kind == "identity":
        return entry, lambda h: h @ encoder.T + number
    if kind == "relu":
        return entry, lambda h: (h @ encoder.T + number).relu()
    entry["threshold"] = threshold = _number(rng, 0.5)

    def fn(h: Tensor) -> Tensor:
        p = h @ encoder.T + number
        margins.note(p, threshold)
        return torch.where(p > threshold, p, 0.0)

    return entry, fn


# Writes.


def write_edit(
    rng: random.Random, layers: Sequence[int], margins: Margins
) -> tuple[dict[str, Any], Edit]:
    """A write's own keys and what it does."""
    kernel = rng.choice(tuple(_WRITES))
    entry: dict[str, Any] = {"write": kernel}
    if rng.random() < 0.8:
        # What moves h towards something else would make it grow at other scales.
        least = -1.5 if kernel in ("steering_vector", "affine") else 0.0
        entry["scale"] = round(rng.uniform(least, 1.5), 2)
    scale = entry.get("scale", 1.0)
    if kernel not in ("affine", "feature_clamp"):
        entry["vector"], v = _row(rng, layers)
    else:
        v = TENSORS["v0"]
    edit = _WRITES[kernel](rng, entry, v, scale, margins)
    if rng.random() < 0.2:
        entry["preserve_norm"] = True
        edit = f.norm_preserved(edit)
    return entry, edit


_Make = Callable[[random.Random, dict[str, Any], Tensor, float, Margins], Edit]


def _clamp(
    rng: random.Random, entry: dict[str, Any], v: Tensor, scale: float, _: Margins
) -> Edit:
    lo, hi = sorted((_number(rng, 2), _number(rng, 2)))
    bounds = rng.choice(({"lo": lo}, {"hi": hi}, {"lo": lo, "hi": hi}))
    entry |= bounds
    whole = judge.clamp(v, bounds.get("lo", -1e30), bounds.get("hi", 1e30))
    return lambda h, p, n: torch.lerp(h, whole(h, p, n), scale)


def _one_sided(
    rng: random.Random, entry: dict[str, Any], v: Tensor, scale: float, _: Margins
) -> Edit:
    entry["offset"] = offset = _number(rng, 1)
    return judge.one_sided(v, offset, scale)


def _affine(
    rng: random.Random, entry: dict[str, Any], _: Tensor, scale: float, margins: Margins
) -> Edit:
    entry |= {"u": "u", "v": "v"}
    bias = torch.zeros(RANK)
    if rng.random() < 0.5:
        entry["bias"], bias = "b", TENSORS["b"]
    kind = entry["function"] = rng.choice(("identity", "relu", "sigmoid", "step"))
    u, v = TENSORS["u"], TENSORS["v"]

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        p = h @ v.T + bias
        if kind == "step":
            margins.note(p, 0.0)
        shapes = {"identity": p, "relu": p.relu(), "sigmoid": p.sigmoid()}
        return h + scale * shapes.get(kind, (p > 0).float()) @ u

    return fn


def _feature_clamp(
    rng: random.Random, entry: dict[str, Any], _: Tensor, scale: float, margins: Margins
) -> Edit:
    decoder, encoder = rng.sample([f"v{i}" for i in range(6)], 2)
    numbers = {"bias": _number(rng, 1), "threshold": _number(rng, 1),
               "value": _number(rng, 3)}  # fmt: skip
    entry |= {"vector": decoder, "weight": encoder, **numbers}
    whole = f.feature_clamp(TENSORS[decoder], TENSORS[encoder], **numbers)

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        margins.note(h @ TENSORS[encoder] + numbers["bias"], numbers["threshold"])
        return torch.lerp(h, whole(h, positions, prompt_len), scale)

    return fn


_WRITES: Final[dict[str, _Make]] = {
    "steering_vector": lambda rng, entry, v, scale, _: judge.add(v, scale),
    "ablate": lambda rng, entry, v, scale, _: judge.ablate(v, scale),
    "replace": lambda rng, entry, v, scale, _: f.replace(v, scale),
    "mask": lambda rng, entry, v, scale, _: f.mask(v, scale),
    "one_sided": _one_sided,
    "clamp": _clamp,
    "affine": _affine,
    "feature_clamp": _feature_clamp,
}
