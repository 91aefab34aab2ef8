"""A truthfulness probe (Orgad et al. 2025, arXiv 2410.02707).

    p = sigmoid(w . h + b)         probability that the answer is correct

Logistic regression on one token's activation, best the last token of the exact answer.
Which token that is shows when the answer is there; so every token is scored, and the
client picks.
"""

from torch import Tensor

from eyesplice.fx_passes.apps import App
from eyesplice.fx_passes.builder import read
from eyesplice.integration.apps.fitting import Probe, logistic_regression


def fit(correct: Tensor, wrong: Tensor, c: float = 1.0) -> Probe:
    """The probe w, b, with scikit-learn's default penalty as the authors have it.

    Args:
        correct: `[n, hidden]`, a token of each correct answer, e.g. `mlp.post`.
        wrong: `[m, hidden]`, of each wrong answer.
        c: weight of the samples against the penalty.

    Raises:
        SpecError: not such activations.
    """
    return logistic_regression(correct, wrong, c)


def app(
    weight: Tensor,
    bias: float,
    layer: int,
    submodule: str = "mlp.post",
    when: str = "all",
    name: str = "orgad",
) -> App:
    """A probe that scores tokens and changes nothing.

    Args:
        weight: `[hidden]`.
        bias: a number.
        layer: the one that the activations were taken from, 13 to 15 of 32 in the paper.
        submodule: `mlp.post` or `attention.post`.
        when: which tokens are scored.
        name: of the app.

    Raises:
        SpecError: not such a probe, place, condition or name.
    """
    probe = read("probe", name="truth", weight="weight", bias=bias, function="sigmoid")
    functions = [probe.layers([layer]).submodule(submodule).cond(when)]
    return App(name, functions, {"weight": weight})
