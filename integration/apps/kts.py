"""Steering only unsafe requests, after KTS (Stickland et al. 2024, arXiv 2406.15518).

    unsafe: w . h + b >= 0 at the prompt's last token          a probe at an early layer
    h += scale * v         on every token from there on, at later layers

v is the difference of the classes' means ("cluster mean"). The paper also trains the
model, with LoRA, to be changed little by steering on harmless prompts: serve that
adapter as vLLM does any other. It steers layers -30 to -11 of Llama-2-7B by +-1.5.
"""

from typing import Any

from torch import Tensor

from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import read, write
from eyesplice.integration.apps.fitting import (
    Probe,
    difference_of_means,
    logistic_regression,
)


def fit(wanted: Tensor, unwanted: Tensor) -> Tensor:
    """The steering vector v, fp32 `[hidden]` or `[layers, hidden]`.

    Args:
        wanted: `[n, hidden]` or `[n, layers, hidden]`, of texts to steer towards.
        unwanted: the same, of texts to steer away from.

    Raises:
        SpecError: not such activations.
    """
    return difference_of_means(wanted, unwanted)


def fit_probe(unsafe: Tensor, safe: Tensor, c: float = 1.0) -> Probe:
    """The probe w, b of unsafe prompts.

    Args:
        unsafe: `[n, hidden]`, `residual.post` at the last token of unsafe prompts.
        safe: `[m, hidden]`, of safe ones.
        c: weight of the samples against the penalty.

    Raises:
        SpecError: not such activations.
    """
    return logistic_regression(unsafe, safe, c)


def app(
    vector: Tensor,
    weight: Tensor,
    bias: float,
    layers: Any,
    *,
    probe_layer: int = 5,
    scale: float = 1.5,
    name: str = "kts",
) -> App:
    """Steering of those requests whose prompt a probe takes for unsafe.

    Args:
        vector: `[hidden]` or `[layers, hidden]`.
        weight: `[hidden]`, of the probe.
        bias: of the probe.
        layers: decoder layers to steer, each after `probe_layer`.
        probe_layer: the one that the probe was fitted on.
        scale: the paper's c.
        name: of the app.

    Raises:
        SpecError: not such tensors, layers or name.
    """
    probe = (
        read("probe", name="unsafe", weight="weight", bias=bias)
        .layers([probe_layer])
        .submodule("residual.post")
        .cond("last_token")
    )
    steer = (
        write("steering_vector", name="steer", vector="vector", scale=scale)
        .layers(layers)
        .submodule("residual.post")
        .cond(gate="latch(unsafe >= 0)")
    )
    return App(name, [probe, steer], {"vector": vector, "weight": weight})
