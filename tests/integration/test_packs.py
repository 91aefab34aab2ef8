"""Packs in a real engine against their formulas, written as hooks from the papers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyesplice import App
from eyesplice.integration.apps import arditi, cast, kts, sake, seal, steermoe
from tests import functions as f
from tests import oracle as judge
from tests.engine import Answer, Ask, assert_judged, distance, engine, prompt
from tests.functions import Fn
from tests.oracle import Intervention, Oracle
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS

pytestmark = pytest.mark.engine

POST, PRE = "residual.post", "residual.pre"
PROMPTS = [prompt(14, 700), prompt(15, 701)]
IDS = list(range(0, 512, 2))
TOKENS = 8


def _normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(90 + seed)
    return torch.randn(*shape, generator=generator)


def _plain_scores(oracle: Oracle, read: Fn) -> list[Tensor]:
    found = []
    for ids in PROMPTS:
        run, hooks = f.interventions([read], len(ids), len(ids))
        oracle.logprobs(ids, len(ids), hooks)
        found.append(run.scores[read.name, read.layers[0]])
    return found


class Packs:
    """The apps, and each as hooks; thresholds let the first prompt in, not the other."""

    def __init__(self, oracle: Oracle) -> None:
        self.direction, self.vector = _normal(HIDDEN_SIZE), _normal(HIDDEN_SIZE, seed=1)
        self.weight, self.centre = _normal(HIDDEN_SIZE, seed=2), None
        self.oracle = oracle
        self.cast_read = Fn(
            "c", PRE, [1], read=f.tanh_cosine(self.weight), when=judge.prompt
        )
        means = [scores.mean() for scores in _plain_scores(oracle, self.cast_read)]
        self.cast_over = means[0] > means[1]
        self.cast_threshold = float((means[0] + means[1]) / 2)
        self.kts_read = Fn(
            "p", POST, [1], read=f.probe(self.weight), when=judge.last_token
        )
        last = [scores[-1] for scores in _plain_scores(oracle, self.kts_read)]
        self.kts_sign = 1.0 if last[0] > last[1] else -1.0
        self.kts_bias = float(-self.kts_sign * (last[0] + last[1]) / 2)
        rows: list[Tensor] = []
        record = [Intervention(POST, NUM_LAYERS - 1, judge.record(rows))]
        for ids in PROMPTS:
            oracle.logprobs(ids, len(ids), record)
        source = rows[0][-1] + 0.3 * _normal(20, HIDDEN_SIZE, seed=3)
        target = source + self.vector + 0.2 * _normal(20, HIDDEN_SIZE, seed=4)
        near = (rows[0][-1] - source.mean(0)).norm()
        far = (rows[1][-1] - source.mean(0)).norm()
        self.edit = sake.fit(source, target, threshold=float((near + far) / 2))

    def apps(self) -> list[App]:
        calibrated = seal.app(self.vector, 2, scale=1.5)
        return [
            arditi.app(self.direction),
            App(
                "seal",
                calibrated.functions,
                calibrated.tensors,
                {"blank_line": IDS},
            ),
            cast.app(
                self.weight,
                self.vector,
                [1],
                [2, 3],
                self.cast_threshold,
                comparison=">" if self.cast_over else "<",
            ),
            kts.app(
                self.vector,
                self.kts_sign * self.weight,
                self.kts_bias,
                [2, 3],
                probe_layer=1,
            ),
            sake.app([self.edit]),
        ]

    def functions(self, name: str, ids: list[int]) -> list[Fn]:
        every = list(range(NUM_LAYERS))
        match name:
            case "arditi":
                edit = judge.ablate(self.direction)
                places = (PRE, "attention.post", "mlp.post")
                return [Fn(place, place, every, edit=edit) for place in places]
            case "seal":
                mask = f.all_of(judge.generated, f.token_in(ids, IDS))
                return [Fn("w", POST, [2], edit=judge.add(self.vector, 1.5), when=mask)]
            case "cast":
                test = f.COMPARISONS[">" if self.cast_over else "<"](
                    self.cast_threshold
                )
                gate = f.reduced("c", 1, "mean", "prompt", test)
                edit = judge.add(self.vector)
                return [self.cast_read, Fn("w", PRE, [2, 3], edit=edit, gate=gate)]
            case "kts":
                read = Fn(
                    "p",
                    POST,
                    [1],
                    read=f.probe(self.kts_sign * self.weight, self.kts_bias),
                    when=judge.last_token,
                )
                gate = f.latch(f.score("p", 1, f.COMPARISONS[">="](0.0)))
                edit = judge.add(self.vector, 1.5)
                return [read, Fn("w", POST, [2, 3], edit=edit, gate=gate)]
        return [Fn("w", POST, [NUM_LAYERS - 1], edit=self._transport)]

    def _transport(self, h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        """A h + b of the edit at the prompt's last token, if it is in scope."""
        e = self.edit
        a = torch.eye(HIDDEN_SIZE) + e.u.T @ e.v
        moved = h @ a.T + e.bias @ e.u + e.offset
        close = (h - e.centre).norm(dim=-1) <= e.threshold
        return torch.where((close & (positions == prompt_len - 1))[:, None], moved, h)


NAMES = ("arditi", "seal", "cast", "kts", "sake")
GATED = ("cast", "kts", "sake")


@pytest.fixture(scope="module")
def packs(llama_oracle: Oracle) -> Packs:
    return Packs(llama_oracle)


@pytest.fixture(scope="module")
def answers(
    packs: Packs, models: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Answer]:
    folder = tmp_path_factory.mktemp("packs")
    with engine(models["llama"], _saved(packs.apps(), folder)) as running:
        asked = [(name, i) for name in ("off", *NAMES) for i in (0, 1)]
        found = running.ask(*(Ask(PROMPTS[i], name, TOKENS) for name, i in asked))
    return dict(zip(asked, found, strict=True))


def _saved(apps: list[App], folder: Path) -> dict[str, Any]:
    for app in apps:
        app.save(folder / app.name)
    return {"apps": [str(folder / app.name) for app in apps], "max_entries": 16}


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_does_what_its_formula_says(
    name: str, packs: Packs, answers: dict[tuple[str, int], Answer]
):
    for i, ids in enumerate(PROMPTS):
        answer = answers[name, i]
        seen = [*ids, *answer.tokens][:-1]
        _, hooks = f.interventions(packs.functions(name, seen), len(seen), len(ids))
        assert_judged(packs.oracle, answer, *hooks, label=f"{name} {i}")
        moved = distance(answer, answers["off", i])
        acts = name not in GATED or i == 0
        assert moved > 1e-3 if acts else moved <= 1e-5, f"{name} {i}: {moved}"


def test_steermoe_picks_the_experts_that_it_is_told(models: Any, tmp_path: Path):
    activate, deactivate = {0: [3], 2: [1]}, {0: [0], 1: [2, 3]}
    app = steermoe.app(activate, deactivate)
    oracle = Oracle(models["mixtral"])
    with engine(models["mixtral"], _saved([app], tmp_path)) as running:
        plain, steered = running.ask(
            Ask(PROMPTS[0], "off"), Ask(PROMPTS[0], "steermoe")
        )
    with _rule(oracle, activate, deactivate):
        assert_judged(oracle, steered, label="steermoe")
    assert distance(plain, steered) > 1e-3


@contextmanager
def _rule(
    oracle: Oracle, activate: dict[int, list[int]], deactivate: dict[int, list[int]]
) -> Iterator[None]:
    """s = log softmax(z); s_e = max s + eps, then s_e = min s - eps, eps = 0.01."""

    def hook_of(layer: int) -> Any:
        def hook(gate: Any, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
            s = output[0].log_softmax(dim=-1)
            high = s.max(dim=-1).values + 0.01
            low = s.min(dim=-1).values - 0.01
            for expert in activate.get(layer, ()):
                s[:, expert] = high
            for expert in deactivate.get(layer, ()):
                s[:, expert] = low
            top, chosen = s.softmax(dim=-1).topk(gate.top_k, dim=-1)
            return s, top / top.sum(dim=-1, keepdim=True), chosen

        return hook

    with ExitStack() as stack:
        for layer in {*activate, *deactivate}:
            gate = oracle.layers[layer].get_submodule("mlp.gate")
            stack.callback(gate.register_forward_hook(hook_of(layer)).remove)
        yield
