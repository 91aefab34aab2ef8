"""Steering a mixture's experts, SteerMoE (Fayyaz et al. 2026, arXiv 2509.09660).

    s = log_softmax(router logits)
    s_e = max(s) + epsilon for activated experts, min(s) - epsilon for deactivated ones

Then the router picks and weighs its top k from s. Which experts: those whose frequency
of being picked differs most between two sets of texts, the risk difference

    Delta_e = (share of tokens that go to e in the first set) - (in the second set)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import write


class Experts(NamedTuple):
    """Expert numbers by layer.

    Attributes:
        activate: of experts that every token goes to.
        deactivate: of experts that no token goes to.
    """

    activate: dict[int, list[int]]
    deactivate: dict[int, list[int]]


def fit(first: Tensor, second: Tensor, num_experts: int) -> Tensor:
    """The risk difference of each expert, fp64 `[layers, experts]`.

    Args:
        first: int `[tokens, layers, top_k]`, the experts that each token of the first
            set of texts went to, as the read `router` gives them.
        second: the same for the second set.
        num_experts: of a layer.

    Raises:
        SpecError: not such numbers of experts.
    """
    shares = [
        _shares(key, value, num_experts)
        for key, value in (("first", first), ("second", second))
    ]
    if shares[0].shape != shares[1].shape:
        raise SpecError(
            "second",
            list(second.shape),
            f"{first.shape[1]} layers, as in the first set",
            "read both at the same layers",
        )
    return shares[0] - shares[1]


def _shares(key: str, picked: Tensor, num_experts: int) -> Tensor:
    if (
        picked.dim() != 3
        or 0 in picked.shape
        or picked.is_floating_point()
        or int(picked.min()) < 0
        or int(picked.max()) >= num_experts
    ):
        raise SpecError(
            key,
            f"{picked.dtype} {list(picked.shape)}",
            f"int [tokens, layers, top_k] of experts 0..{num_experts - 1}",
            "stack what the router reads gave",
        )
    went = torch.zeros(*picked.shape[:2], num_experts, dtype=torch.float64)
    return went.scatter(2, picked.cpu().long(), 1.0).mean(dim=0)


def choose(
    risk: Tensor,
    activate: int,
    deactivate: int,
    top_k: int,
    layers: Sequence[int] | None = None,
) -> Experts:
    """The experts with the largest differences, over all layers.

    Args:
        risk: `[layers, experts]`, see `fit`.
        activate: how many experts to activate: those of the largest positive difference.
        deactivate: how many to deactivate: those of the largest negative one.
        top_k: experts that a token goes to; no layer activates more, or leaves fewer.
        layers: which decoder layer each row of `risk` is about; None for 0, 1, 2, ...
    """
    numbers = range(len(risk)) if layers is None else layers
    return Experts(
        _largest(risk, activate, top_k, numbers),
        _largest(-risk, deactivate, risk.shape[1] - top_k, numbers),
    )


def _largest(
    risk: Tensor, count: int, per_layer: int, layers: Sequence[int]
) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in risk.flatten().argsort(descending=True, stable=True).tolist():
        row, expert = divmod(place, risk.shape[1])
        if count == 0 or float(risk[row, expert]) <= 0:
            break
        if len(found.get(layers[row], ())) < per_layer:
            found.setdefault(layers[row], []).append(expert)
            count -= 1
    return {layer: sorted(experts) for layer, experts in sorted(found.items())}


def app(
    activate: Mapping[int, Sequence[int]],
    deactivate: Mapping[int, Sequence[int]],
    epsilon: float = 0.01,
    name: str = "steermoe",
) -> App:
    """Activation and deactivation of experts, on all tokens.

    Args:
        activate: expert numbers by decoder layer.
        deactivate: the same.
        epsilon: how far above or below all others their scores are put.
        name: of the app.

    Raises:
        SpecError: no experts, or a name that cannot be.
    """
    given = {"activate": activate, "deactivate": deactivate}
    chosen = {
        key: {str(layer): list(experts) for layer, experts in by_layer.items()}
        for key, by_layer in given.items()
        if by_layer
    }
    return App(name, [write("router", name="experts", epsilon=epsilon, **chosen)])
