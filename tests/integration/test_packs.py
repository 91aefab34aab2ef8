"""Every pack, fitted and deployed as an app, does what its paper's formula does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from eyesplice import App
from eyesplice.integration.apps import (
    arditi,
    cast,
    kts,
    orgad,
    sake,
    seal,
)
from tests import functions as f
from tests import oracle as judge
from tests.engine import Answer, Ask, assert_judged, distance, engine, prompt
from tests.functions import Fn
from tests.oracle import Intervention, Oracle
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS

pytestmark = pytest.mark.engine

PRE, POST, MLP = "residual.pre", "residual.post", "mlp.post"
TOKENS: Final = 10
BLANK_LINES: Final = list(range(0, 512, 2))
CONDITION_LAYERS: Final = (0, 1)


def _group(seed: int) -> list[list[int]]:
    """Prompts with one ending, whose last tokens' activations lie close together."""
    return [prompt(7, 10 * seed + i) + prompt(4, 10 * seed) for i in range(8)]


FIRST, SECOND, THIRD = map(_group, (40, 50, 60))
# Of the same groups, but not among the samples.
LIKE_FIRST = prompt(7, 408) + prompt(4, 400)
LIKE_SECOND = prompt(7, 508) + prompt(4, 500)
OTHER = prompt(11, 703)


def _rows(oracle: Oracle, ids: Sequence[int], submodule: str, layer: int) -> Tensor:
    """`[tokens, hidden]` of a prompt."""
    found: list[Tensor] = []
    hook = Intervention(submodule, layer, judge.record(found))
    oracle.logprobs(ids, len(ids), [hook])
    return found[0]


def _last(
    oracle: Oracle, prompts: Sequence[Sequence[int]], submodule: str, layer: int
) -> Tensor:
    """`[prompts, hidden]` of their last tokens."""
    return torch.stack([_rows(oracle, ids, submodule, layer)[-1] for ids in prompts])


def _halfway(a: float, b: float) -> float:
    """Between two values that no rounding brings together."""
    assert abs(a - b) > 1e-2
    return (a + b) / 2


@dataclass(frozen=True)
class Case:
    """A prompt for an app, and the paper's functions on the request's tokens.

    `steers` says whether the app may change the answer.
    """

    app: App
    prompt: Sequence[int]
    functions: Callable[[Sequence[int]], list[Fn]]
    steers: bool = True


def _arditi(o: Oracle) -> dict[str, Case]:
    harmful, harmless = (_last(o, group, PRE, 2) for group in (FIRST, SECOND))
    r = harmful.mean(dim=0) - harmless.mean(dim=0)
    written = {"input": PRE, "attention": "attention.post", "mlp": MLP}
    ablations = [
        Fn(name, submodule, range(NUM_LAYERS), edit=judge.ablate(r))
        for name, submodule in written.items()
    ]
    addition = [Fn("add", PRE, [2], edit=judge.add(r, -1.0))]
    direction = arditi.fit(harmful, harmless)
    return {
        "arditi": Case(arditi.app(direction), OTHER, lambda ids: ablations),
        "arditi addition": Case(
            arditi.addition(direction, 2, -1.0), LIKE_FIRST, lambda ids: addition
        ),
    }


def _seal(o: Oracle) -> dict[str, Case]:
    groups = (FIRST, SECOND, THIRD[:3])
    execution, reflection, transition = (_last(o, g, POST, 1) for g in groups)
    others = torch.cat([reflection, transition])
    s = execution.mean(dim=0) - others.mean(dim=0)
    vector = seal.fit(execution, reflection, transition)
    # There is no tokenizer that could tell which tokens end with a blank line.
    app = seal.app(vector, layer=1, scale=1.5, token_ids=BLANK_LINES)

    def functions(ids: Sequence[int]) -> list[Fn]:
        when = f.all_of(judge.generated, f.token_in(ids, BLANK_LINES))
        return [Fn("calibrate", POST, [1], edit=judge.add(s, 1.5), when=when)]

    return {"seal": Case(app, OTHER, functions)}


def _cast(o: Oracle, pool: str) -> dict[str, Case]:
    """With the mean of sim above a threshold, or the last token's below one."""
    mean = pool == "mean"
    layers = CONDITION_LAYERS if mean else CONDITION_LAYERS[1:]
    c, v = (cast.fit(_last(o, FIRST, PRE, n), _last(o, SECOND, PRE, n)) for n in (1, 2))

    def pooled(ids: Sequence[int]) -> float:
        sims = [f.tanh_cosine(c)(_rows(o, ids, PRE, layer)) for layer in layers]
        return max(float(sim.mean() if mean else sim[-1]) for sim in sims)

    low, high = sorted((LIKE_FIRST, LIKE_SECOND), key=pooled)
    threshold = _halfway(pooled(low), pooled(high))
    comparison: Any = ">" if mean else "<"
    name = f"cast-{pool}"
    app = cast.app(
        c, v, layers, "2-3", threshold, comparison=comparison, pool=pool, scale=4.0,
        name=name,
    )  # fmt: skip
    test = f.COMPARISONS[comparison](threshold)
    gates = [
        f.reduced(f"condition{i}", layer, pool, "prompt", test)
        for i, layer in enumerate(layers)
    ]
    when = judge.prompt if mean else judge.last_token
    functions = [
        *(
            Fn(f"condition{i}", PRE, [layer], read=f.tanh_cosine(c), when=when)
            for i, layer in enumerate(layers)
        ),
        Fn("behaviour", PRE, [2, 3], edit=judge.add(v, 4.0), gate=f.either(*gates)),
    ]
    met, unmet = (high, low) if mean else (low, high)
    return {
        f"{name} met": Case(app, met, lambda ids: functions),
        f"{name} not met": Case(app, unmet, lambda ids: functions, steers=False),
    }


def _orgad(o: Oracle) -> dict[str, Case]:
    w, b = orgad.fit(_last(o, FIRST, MLP, 2), _last(o, SECOND, MLP, 2))
    p = Fn("truth", MLP, [2], read=lambda h: 1 / (1 + torch.exp(-(h @ w + b))))
    return {"orgad": Case(orgad.app(w, b, 2), OTHER, lambda ids: [p], steers=False)}


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return vectors @ torch.diag(values**exponent) @ vectors.T


def _transport(source: Tensor, target: Tensor, reg: float) -> judge.Edit:
    """h to A h + m_t - A m_s, with A as the paper writes it, in full."""
    s, t = source.double(), target.double()
    m_s, m_t = s.mean(dim=0), t.mean(dim=0)
    ridge = reg * torch.eye(HIDDEN_SIZE, dtype=torch.float64)
    c_s = (s - m_s).T @ (s - m_s) / len(s) + ridge
    c_t = (t - m_t).T @ (t - m_t) / len(t) + ridge
    root, back = _power(c_s, 0.5), _power(c_s, -0.5)
    a = back @ _power(root @ c_t @ root, 0.5) @ back
    return lambda h, positions, prompt_len: (
        (h.double() @ a.T + m_t - a @ m_s).float()
    )  # fmt: skip


def _sake(o: Oracle) -> dict[str, Case]:
    """Two edits, each of its own group of prompts."""
    last, prompts = NUM_LAYERS - 1, (LIKE_FIRST, LIKE_SECOND, OTHER)
    samples = [_last(o, group, POST, last) for group in (FIRST, SECOND, THIRD)]
    asked = _last(o, prompts, POST, last)
    edits, functions = [], []
    for i, (source, target) in enumerate(pairwise(samples)):
        m_s = source.mean(dim=0)
        mine, *others = (asked - m_s).norm(dim=1).roll(-i).tolist()
        threshold = _halfway(mine, min(others))
        edits.append(sake.fit(source, target, reg=0.5, threshold=threshold))
        scope, where = f"edit{i}_scope", {"submodule": POST, "layers": [last]}
        functions.append(
            Fn(scope, **where, read=f.distance_to(m_s), when=judge.last_token)
        )
        gate = f.score(scope, last, f.COMPARISONS["<="](threshold))
        edit = _transport(source, target, 0.5)
        functions.append(
            Fn(f"edit{i}_shift", **where, edit=edit, when=judge.last_token, gate=gate)
        )
    app = sake.app(edits)
    return {
        f"sake {label}": Case(app, ids, lambda _: functions, steers=ids != OTHER)
        for label, ids in zip(("first", "second", "neither"), prompts, strict=True)
    }


def _kts(o: Oracle) -> dict[str, Case]:
    """A vector with a row for each layer."""
    unsafe, safe = (_last(o, group, POST, 1) for group in (FIRST, SECOND))
    w, b = kts.fit_probe(unsafe, safe)
    wanted, unwanted = (
        torch.stack([_last(o, g, POST, n) for n in range(NUM_LAYERS)], dim=1)
        for g in (SECOND, THIRD)
    )
    v = wanted.mean(dim=0) - unwanted.mean(dim=0)
    app = kts.app(kts.fit(wanted, unwanted), w, b, "2-3", probe_layer=1)
    gate = f.latch(f.score("unsafe", 1, lambda score: score >= 0))
    functions = [
        Fn("unsafe", POST, [1], read=f.probe(w, b), when=judge.last_token),
        Fn("steer", POST, [2], edit=judge.add(v[2], 1.5), gate=gate),
        Fn("steer", POST, [3], edit=judge.add(v[3], 1.5), gate=gate),
    ]
    return {
        "kts unsafe": Case(app, LIKE_FIRST, lambda ids: functions),
        "kts safe": Case(app, LIKE_SECOND, lambda ids: functions, steers=False),
    }


NAMES: Final = (
    "arditi", "arditi addition", "seal", "cast-mean met", "cast-mean not met",
    "cast-last met", "cast-last not met", "orgad", "sake first", "sake second",
    "sake neither", "kts unsafe", "kts safe",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases(llama_oracle: Oracle) -> dict[str, Case]:
    o = llama_oracle
    parts = _arditi(o), _seal(o), _cast(o, "mean"), _cast(o, "last")
    more = _orgad(o), _sake(o), _kts(o)
    return {name: case for part in (*parts, *more) for name, case in part.items()}


@pytest.fixture(scope="module")
def answers(
    models: Any, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Answer, Answer]]:
    """The plain answer and the app's, all apps in one batch of one engine."""
    root = tmp_path_factory.mktemp("packs")
    folders = {str(root / c.app.name): c.app for c in cases.values()}
    for folder, app in folders.items():
        app.save(folder)
    config = {"apps": [*folders], "max_entries": 16}
    with engine(models["llama"], config) as running:
        plain = running.ask(*(Ask(c.prompt, None, TOKENS) for c in cases.values()))
        asks = [Ask(c.prompt, c.app.name, TOKENS) for c in cases.values()]
        both = zip(plain, running.ask(*asks), strict=True)
    return dict(zip(cases, both, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_does_what_its_formula_does(
    answers: Mapping[str, tuple[Answer, Answer]],
    cases: Mapping[str, Case],
    llama_oracle: Oracle,
    name: str,
):
    case, (plain, answer) = cases[name], answers[name]
    ids = [*answer.prompt, *answer.tokens][:-1]
    run, hooks = f.interventions(case.functions(ids), len(ids), len(answer.prompt))
    assert_judged(llama_oracle, answer, *hooks, label=name)
    moved = distance(answer, plain)
    assert moved > 1e-3 if case.steers else moved <= 1e-5
    found, app = answer.eyesplice, case.app.name
    assert found["apps"] == [app] and "error" not in found
    tokens = {write["function"]: write["tokens"] for write in found["writes"]}
    for function, fired in run.fired.items():
        acted, when = int(fired.sum()), int(run.evaluated[function].sum())
        assert tokens[f"{app}/{function}"] == acted
        gate = found["gates"].get(f"{app}/{function}")
        assert gate in (None, {"passed": acted, "evaluated": when})
    assert any(tokens.values()) == case.steers
    for (function, _), expected in run.scores.items():
        _check_scores(found["scores"][f"{app}/{function}"], expected, case, function)


def _check_scores(
    reported: Mapping[str, Any], expected: Tensor, case: Case, function: str
) -> None:
    (entry,) = [e for e in case.app.functions if e["name"] == function]
    (places,) = torch.where(~expected.isnan())
    values = expected[places]
    if entry.get("reduce"):
        values = values.mean(dim=0, keepdim=True)
        places = places[-1:]
    assert reported["positions"] == places.tolist()
    got = torch.tensor(reported["values"])
    torch.testing.assert_close(got, values, atol=1e-4, rtol=1e-4)


def test_seal_steers_some_of_the_generated_tokens(
    answers: Mapping[str, tuple[Answer, Answer]],
):
    (write,) = answers["seal"][1].eyesplice["writes"]
    assert 0 < write["tokens"] < TOKENS - 1
