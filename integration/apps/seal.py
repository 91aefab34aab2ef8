"""Calibrated reasoning, SEAL (Chen et al. 2025, arXiv 2504.07986).

    S = mean of execution thoughts - mean of reflection and transition thoughts
    h += scale * S       on generated tokens whose text ends with a blank line

A thought's activation is that of the blank line which ends it, at one layer's output:
the paper takes layer 20 of R1-Distill-Qwen-1.5B and 7B, and 55 of QwQ-32B.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import write
from eyesplice.integration.apps.fitting import difference_of_means, samples

BLANK_LINE = "\n\n"


def fit(execution: Tensor, reflection: Tensor, transition: Tensor) -> Tensor:
    """The vector S, fp32 `[hidden]`.

    Args:
        execution: `[n, hidden]`, `residual.post` at the end of thoughts that go on.
        reflection: `[m, hidden]`, of thoughts that check what was found.
        transition: `[k, hidden]`, of thoughts that change the approach.

    Raises:
        SpecError: not such activations.
    """
    others = [
        samples("reflection", reflection, like=execution),
        samples("transition", transition, like=execution),
    ]
    return difference_of_means(execution, torch.cat(others))


def app(
    vector: Tensor,
    layer: int,
    scale: float = 1.0,
    name: str = "seal",
    token_ids: Sequence[int] | None = None,
) -> App:
    """Steering at the end of each generated thought.

    Args:
        vector: `[hidden]`.
        layer: the one that the activations were taken from.
        scale: the paper's alpha.
        name: of the app.
        token_ids: the tokens whose text ends with a blank line, for engines without a
            tokenizer; None to have the engine's tokenizer asked.

    Raises:
        SpecError: not such a vector, layer, name or tokens.
    """
    steer = (
        write("steering_vector", name="calibrate", vector="vector", scale=scale)
        .layers([layer])
        .submodule("residual.post")
        .cond("generated and token_in(blank_line)")
    )
    rule = {"decoded_endswith": BLANK_LINE}
    blank_line = rule if token_ids is None else list(token_ids)
    return App(name, [steer], {"vector": vector}, {"blank_line": blank_line})
