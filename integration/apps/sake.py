"""Knowledge editing by optimal transport, SAKE (Scialanga et al. 2025, arXiv 2503.01751).

    in scope: |h - m_s| <= threshold, at the prompt's last token and the last layer
    h <- A h + m_t - A m_s            the linear transport map from source to target
    A = C_s^-1/2 (C_s^1/2 C_t C_s^1/2)^1/2 C_s^-1/2

m and C are the mean and the covariance (divided by n) of the samples' activations, the
latter plus reg * I, as in POT's `ot.da.LinearTransport`.

A is never made. Outside the span of the centred samples C_s = C_t = reg * I, so A is
the identity there; with an orthonormal basis Q of the span, `A = I + Q (A_Q - I) Q^T`,
where A_Q is the map between the covariances in that basis. A_Q is symmetric, so with
its eigenvalues a_r and eigenvectors w_r the map is the sum of two writes:

    h += sum_r (a_r - 1) q_r (q_r . h - q_r . m_s),   q_r = Q w_r      affine
    h += m_t - m_s                                                     steering_vector
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import Function, read, write
from eyesplice.integration.apps.fitting import samples

_SMALLEST: Final = 1e-12
"""Singular values below this part of the largest are numerical noise."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """One edited fact: its scope and its map, all tensors fp32.

    Attributes:
        centre: `[hidden]`, m_s.
        threshold: the distance from it that is still in scope.
        u: `[rank, hidden]`, (a_r - 1) q_r.
        v: `[rank, hidden]`, q_r.
        bias: `[rank]`, -q_r . m_s.
        offset: `[hidden]`, m_t - m_s.
    """

    centre: Tensor
    threshold: float
    u: Tensor
    v: Tensor
    bias: Tensor
    offset: Tensor


def fit(
    source: Tensor,
    target: Tensor,
    *,
    reg: float = 1e-2,
    rank: int | None = None,
    threshold: float | None = None,
) -> Edit:
    """The edit that moves the activations of `source` onto those of `target`.

    Args:
        source: `[n, hidden]`, `residual.post` of the last layer at the last token of
            prompts that ask for the old fact.
        target: `[m, hidden]`, of prompts whose next token is the new one.
        reg: added to the diagonals of both covariances; positive.
        rank: directions that are kept, those of the largest |a_r - 1|. None keeps all, at
            most n + m - 2, and is exact.
        threshold: of the scope; None takes the farthest sample's distance.

    Raises:
        SpecError: not such activations, or a `reg` or `rank` that is not positive.
    """
    first = samples("source", source)
    second = samples("target", target, like=first)
    for key, value in (("reg", reg), ("rank", rank)):
        if value is not None and value <= 0:
            raise SpecError(key, value, "a positive number", f"raise {key}")
    from_mean, to_mean = first.mean(dim=0), second.mean(dim=0)
    excess, directions = _map(first - from_mean, second - to_mean, reg)
    kept = excess.abs().argsort(descending=True)[:rank]
    excess, directions = excess[kept], directions[kept]
    farthest = float((first - from_mean).norm(dim=1).max())
    return Edit(
        centre=from_mean.float(),
        threshold=farthest if threshold is None else float(threshold),
        u=(excess[:, None] * directions).float(),
        v=directions.float(),
        bias=(-directions @ from_mean).float(),
        offset=(to_mean - from_mean).float(),
    )


def _map(first: Tensor, second: Tensor, reg: float) -> tuple[Tensor, Tensor]:
    """`[k]` a_r - 1 and `[k, hidden]` q_r of the map between centred samples, fp64."""
    both = torch.cat([first, second])
    _, sizes, rows = torch.linalg.svd(both, full_matrices=False)
    # One direction always: a map of rank 0 is no affine write.
    span = rows[: max(1, int((sizes > sizes[0] * _SMALLEST).sum()))]
    ridge = reg * torch.eye(len(span), dtype=torch.float64)
    c_s, c_t = ((x @ span.T).T @ (x @ span.T) / len(x) + ridge for x in (first, second))
    root = _power(c_s, 0.5)
    back = _power(c_s, -0.5)
    values, vectors = torch.linalg.eigh(back @ _power(root @ c_t @ root, 0.5) @ back)
    return values - 1, vectors.T @ span


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    result: Tensor = (vectors * values.pow(exponent)) @ vectors.T
    return result


def app(edits: Sequence[Edit], layer: int = -1, name: str = "sake") -> App:
    """Edits of what the model says next after the prompt.

    Prompts in the scope of several edits are changed by each of them, in order.

    Args:
        edits: at least one; edit i is called `edit{i}`.
        layer: the one that the activations were taken from.
        name: of the app.

    Raises:
        SpecError: no edits, or tensors that do not fit.
    """
    functions: list[Function] = []
    tensors: dict[str, Tensor] = {}
    for i, edit in enumerate(edits):
        label = f"edit{i}"
        for part in ("centre", "u", "v", "bias", "offset"):
            tensors[f"{label}.{part}"] = getattr(edit, part)
        functions += _functions(label, edit.threshold, layer)
    # Every scope is checked on what arrives, before the first edit changes it.
    functions.sort(key=lambda function: "read" not in function.fields)
    return App(name, functions, tensors)


def _functions(label: str, threshold: float, layer: int) -> list[Function]:
    scope = read("distance", name=f"{label}_scope", weight=f"{label}.centre")
    turn = write(
        "affine",
        name=f"{label}_turn",
        u=f"{label}.u",
        v=f"{label}.v",
        bias=f"{label}.bias",
    )
    shift = write("steering_vector", name=f"{label}_shift", vector=f"{label}.offset")
    gate = f"{label}_scope <= {float(threshold)}"
    return [
        scope.layers([layer]).submodule("residual.post").cond("last_token"),
        *(
            step.layers([layer]).submodule("residual.post").cond("last_token", gate)
            for step in (turn, shift)
        ),
    ]
