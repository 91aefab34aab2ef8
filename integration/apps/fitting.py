"""What several packs fit: differences of means, and a linear probe."""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from eyesplice._errors import SpecError

_STEPS: Final = 500
_GRADIENT: Final = 1e-9
"""The optimiser stops below this largest entry of the gradient."""


class Probe(NamedTuple):
    """A linear probe: p = sigmoid(weight . h + bias).

    Attributes:
        weight: fp32 `[hidden]`.
        bias: its logit at h = 0.
    """

    weight: Tensor
    bias: float


def samples(
    name: str, value: Tensor, dims: int = 2, like: Tensor | None = None
) -> Tensor:
    """Captured rows in fp64, one per sample on the first axis.

    Args:
        name: what the error calls them.
        value: any float dtype.
        dims: axes that they must have.
        like: other rows, which those of a sample must be as large as.

    Raises:
        SpecError: another number of axes, no samples, NaN or Inf, or rows of another
            size.
    """
    if value.dim() != dims or 0 in value.shape or not value.isfinite().all():
        raise SpecError(
            name,
            f"{value.dtype} {list(value.shape)}",
            f"finite activations of {dims} axes, a sample each on the first",
            "stack the captured rows",
        )
    if like is not None and value.shape[1:] != like.shape[1:]:
        raise SpecError(
            name,
            list(value.shape),
            f"samples of {list(like.shape[1:])}, as those they are set against",
            "capture both at the same sites",
        )
    return value.detach().cpu().double()


def difference_of_means(first: Tensor, second: Tensor) -> Tensor:
    """Mean of `first` less the mean of `second`, fp32.

    Args:
        first: `[n, hidden]` or `[n, layers, hidden]`, any float dtype.
        second: the same but for n.

    Raises:
        SpecError: not such activations.
    """
    dims = 3 if first.dim() == 3 else 2
    mean = samples("first", first, dims).mean(dim=0)
    return (mean - samples("second", second, dims, first).mean(dim=0)).float()


def logistic_regression(positive: Tensor, negative: Tensor, c: float = 1.0) -> Probe:
    """The probe that minimises |w|^2 / 2 + c * (sum of the samples' log losses).

    That is scikit-learn's `LogisticRegression(C=c)`; the bias is not penalised.

    Args:
        positive: `[n, hidden]`, the class whose probability the probe gives.
        negative: `[m, hidden]`.
        c: weight of the samples against the penalty.

    Raises:
        SpecError: not such activations.
    """
    first = samples("positive", positive)
    second = samples("negative", negative, like=first)
    rows = torch.cat([first, second])
    signs = torch.cat([torch.ones(len(first)), -torch.ones(len(second))]).double()
    # From the middle of the samples the bias and the weight hardly depend on each other.
    centre = rows.mean(dim=0)
    rows = rows - centre
    weight = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_STEPS,
        tolerance_grad=_GRADIENT,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        margins = signs * (rows @ weight + bias)
        value = weight.square().sum() / 2 + c * softplus(-margins).sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    found = weight.detach()
    return Probe(found.float(), float(bias.detach() - found @ centre))
