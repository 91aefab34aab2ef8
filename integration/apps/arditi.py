"""Refusal as a single direction (Arditi et al. 2024, arXiv 2406.11717).

    r = mean of harmful activations - mean of harmless ones        difference of means
    h -= (r . h) r / |r|^2                                         directional ablation
    h += scale * r                                                 activation addition

Ablation acts on everything that is written to the residual stream, here on every
block's input and every attention's and MLP's output, as in the paper's code. Addition
acts on the input of the one block whose activations r was taken from.
"""

from typing import Any

from torch import Tensor

from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import write
from eyesplice.integration.apps.fitting import difference_of_means

_WRITTEN = {
    "input": "residual.pre",
    "attention": "attention.post",
    "mlp": "mlp.post",
}


def fit(harmful: Tensor, harmless: Tensor) -> Tensor:
    """The direction r, fp32 `[hidden]`.

    Args:
        harmful: `[n, hidden]`, `residual.pre` of one layer at one of the last tokens of
            harmful instructions.
        harmless: `[m, hidden]`, the same for harmless ones.

    Raises:
        SpecError: not such activations.
    """
    return difference_of_means(harmful, harmless)


def app(direction: Tensor, layers: Any = "all", name: str = "arditi") -> App:
    """Ablation of a direction from all that the layers read and write.

    Args:
        direction: `[hidden]`, of any length.
        layers: decoder layers.
        name: of the app.

    Raises:
        SpecError: not such a direction, layers or name.
    """
    functions = [
        write("ablate", name=part, vector="direction").layers(layers).submodule(site)
        for part, site in _WRITTEN.items()
    ]
    return App(name, functions, {"direction": direction})


def addition(
    direction: Tensor, layer: int, scale: float = 1.0, name: str = "arditi-add"
) -> App:
    """Addition of a direction to one block's input, on all tokens.

    Args:
        direction: `[hidden]`, not normalised.
        layer: the one whose input r was taken from.
        scale: 1.0 makes the model refuse, -1.0 keeps it from refusing.
        name: of the app.

    Raises:
        SpecError: not such a direction, layer or name.
    """
    steer = write("steering_vector", name="add", vector="direction", scale=scale)
    functions = [steer.layers([layer]).submodule("residual.pre")]
    return App(name, functions, {"direction": direction})
