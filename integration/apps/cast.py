"""Conditional activation steering, CAST (Lee et al. 2025, arXiv 2409.05907).

    sim(h) = cosine of h and tanh(c c^T h / c.c)          c: the condition vector
    condition: sim > threshold at one of the condition layers, from the prompt
    h += scale * v         v: the behaviour vector, on every token once it is met

All of it at the inputs of blocks. `pool="last"` takes sim at the prompt's last token.
`pool="mean"` takes the mean of the prompt tokens' sim, where the authors' code takes sim
of their mean activation: a threshold does not carry over from there.

A condition on the whole prompt is known at its last token. So steering begins there,
and not with the prompt's first token as the authors' code can do in a second pass.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import read, write
from eyesplice.integration.apps.fitting import samples


def fit(positive: Tensor, negative: Tensor) -> Tensor:
    """A condition or behaviour vector from pairs, fp32 `[hidden]`, of length 1.

    The first principal component of all activations, each less the mean of its pair,
    pointing to where the positive ones lie.

    Args:
        positive: `[n, hidden]`, `residual.pre` of one layer; row i and row i of
            `negative` are a pair.
        negative: `[n, hidden]`.

    Raises:
        SpecError: not such activations.
    """
    first = samples("positive", positive)
    second = samples("negative", negative, like=first)
    if len(first) != len(second):
        raise SpecError(
            "negative",
            f"{len(second)} rows",
            f"as many as positive has: {len(first)}",
            "give the activations in pairs",
        )
    # The centred pair is +-half of this, and both halves have the same components.
    apart = first - second
    component: Tensor = torch.linalg.svd(apart, full_matrices=False).Vh[0]
    # Most pairs decide, so that a single outlier cannot turn the direction.
    if (apart @ component > 0).double().mean() < 0.5:
        component = -component
    return component.float()


def app(
    condition: Tensor,
    behaviour: Tensor,
    condition_layers: Sequence[int],
    behaviour_layers: Any,
    threshold: float,
    *,
    comparison: Literal[">", "<"] = ">",
    pool: Literal["mean", "last"] = "mean",
    scale: float = 1.0,
    name: str = "cast",
) -> App:
    """Steering of those requests whose prompt meets a condition.

    Args:
        condition: `[hidden]` or `[layers, hidden]`.
        behaviour: `[hidden]` or `[layers, hidden]`.
        condition_layers: met at one of them is met.
        behaviour_layers: decoder layers, each after the condition layers.
        threshold: of sim, in -1..1.
        comparison: what sim must be of the threshold. In the authors' code,
            `condition_comparator_threshold_is="larger"` is "<", "smaller" is ">".
        pool: "mean" or "last".
        scale: the paper's alpha.
        name: of the app.

    Raises:
        SpecError: not such tensors, layers or names.
    """
    _check_choice("comparison", comparison, (">", "<"))
    _check_choice("pool", pool, ("mean", "last"))
    when = "last_token" if pool == "last" else "prompt"
    reads = [
        read(
            "tanh_cosine",
            name=f"condition{i}",
            weight="condition",
            over="prompt",
            reduce=pool,
        )
        .layers([layer])
        .submodule("residual.pre")
        .cond(when)
        for i, layer in enumerate(condition_layers)
    ]
    met = [f"{r.fields['name']}.{pool} {comparison} {float(threshold)}" for r in reads]
    steer = (
        write("steering_vector", name="behaviour", vector="behaviour", scale=scale)
        .layers(behaviour_layers)
        .submodule("residual.pre")
        .cond(gate=" or ".join(met))
    )
    tensors = {"condition": condition, "behaviour": behaviour}
    return App(name, [*reads, steer], tensors)


def _check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SpecError(key, value, " or ".join(allowed), f"choose {key} from these")
