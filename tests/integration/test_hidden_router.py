"""Routers that run inside the experts' op: a hook arms what no graph shows.

On CPU vLLM traces the experts' code. Told to call its op instead, as it does on a GPU,
it hides the router from the graph there too.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyesplice import SpecError
from eyesplice.integration.apps import steermoe
from eyesplice.integration.hidden_routers import find_hidden_routers
from tests.engine import Answer, Ask, assert_judged, distance, engine, prompt
from tests.experts import routed, steered
from tests.oracle import Oracle
from tests.tiny_models import NUM_LAYERS

pytestmark = pytest.mark.engine

PROMPTS = [prompt(11 + i, 900 + i) for i in range(6)]
ACTIVATE: dict[int, list[int]] = {0: [3], 2: [1]}
DEACTIVATE: dict[int, list[int]] = {0: [0], 1: [2, 3]}
TOLERANCE = 1e-4
ROUTER = "router.logits"
GATE = "p >= 0"


def _spec(vector: bool) -> dict[str, Any]:
    """Captures, scores and experts of the router, and a write behind a gate on it."""
    place = {"submodule": ROUTER}
    reads: list[dict[str, Any]] = [
        {"read": "router", "name": "chosen", "layers": [1, 3]},
        {"read": "capture", "name": "c", "layers": [0, 2], **place},
        {"read": "dot", "name": "p", "weight": "experts", "layers": [1], **place},
    ]
    write = {"vector": "experts", "layers": [2], "scale": 1.5, "gate": GATE, **place}
    return {"reads": reads, "writes": [{"name": "w", **write}] if vector else []}


ASKS: dict[str, object] = {
    "plain": None,
    "steermoe": "steermoe",
    "gated": _spec(True),
    "reads": _spec(False),
    "other": {"writes": [{"vector": "v0", "layers": [1], "submodule": "mlp.pre"}]},
    "again": None,
}


@pytest.fixture(scope="module", autouse=True)
def _through_the_op() -> Iterator[None]:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    with pytest.MonkeyPatch.context() as patch:
        op = torch.ops.vllm.moe_forward
        patch.setattr(MoERunner, "_select_forward", lambda self: op)
        yield


@dataclass(frozen=True)
class World:
    oracle: Oracle
    report: Any
    vanilla: dict[str, Answer]
    alone: dict[str, Answer]
    mixed: dict[str, Answer]


@pytest.fixture(scope="module")
def world(models: Any, vectors: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder: Path = tmp_path_factory.mktemp("app")
    steermoe.app(ACTIVATE, DEACTIVATE).save(folder)
    config = {"vectors": str(vectors.folder), "apps": str(folder), "sites": "all"}
    model = models["qwen3_moe"]
    asks = {
        name: Ask(ids, spec)
        for ids, (name, spec) in zip(PROMPTS, ASKS.items(), strict=True)
    }
    bare = [Ask(ask.prompt) for ask in asks.values()]
    with engine(model) as running:
        vanilla = dict(zip(asks, running.ask(*bare), strict=True))
    with engine(model, config) as running:
        report = running.report
        alone = dict(zip(asks, running.alone(*asks.values()), strict=True))
        mixed = dict(zip(asks, running.ask(*asks.values()), strict=True))
    return World(Oracle(model), report, vanilla, alone, mixed)


def test_the_table_says_module(world: World):
    rows = {row.site: row for row in world.report.rows}
    routers = [row for site, row in rows.items() if site.submodule == ROUTER]
    assert [row.form for row in routers] == ["module"] * NUM_LAYERS
    assert routers[1].node == "layers.1.mlp.gate"
    assert routers[1].shape == "[tokens, 4]"
    assert world.report.num_hooks == NUM_LAYERS
    assert not world.report.missing


WAYS = ("alone", "mixed")


@pytest.mark.parametrize("way", WAYS)
def test_idle_requests_are_vanillas(world: World, way: str):
    for name in ("plain", "again"):
        answer: Answer = getattr(world, way)[name]
        assert answer.tokens == world.vanilla[name].tokens
        assert distance(answer, world.vanilla[name]) <= 1e-5
        assert answer.eyesplice is None


@pytest.mark.parametrize("way", WAYS)
def test_steermoe(world: World, way: str):
    answer: Answer = getattr(world, way)["steermoe"]
    edits = {
        layer: steered(ACTIVATE.get(layer, ()), DEACTIVATE.get(layer, ()))
        for layer in {*ACTIVATE, *DEACTIVATE}
    }
    with routed(world.oracle.layers, edits):
        assert_judged(world.oracle, answer, label=way)
    assert distance(answer, world.vanilla["steermoe"]) > 1e-3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gated", "reads"])
def test_reads_captures_and_gates(world: World, vectors: Any, name: str, way: str):
    answer: Answer = getattr(world, way)[name]
    weight = vectors["experts"]
    ids = [*answer.prompt, *answer.tokens][:-1]
    opened: list[Tensor] = []

    def look(z: Tensor) -> Tensor:
        opened.append(z @ weight >= 0)
        return z

    def write(z: Tensor) -> Tensor:
        return z + 1.5 * weight * opened[-1][:, None] if name == "gated" else z

    edits = {0: lambda z: z, 1: look, 2: write, 3: lambda z: z}
    with routed(world.oracle.layers, edits) as seen:
        assert_judged(world.oracle, answer, label=f"{way}: {name}")
    found = answer.eyesplice
    expected = (seen[1] @ weight).tolist()
    assert found["scores"]["p"]["values"] == pytest.approx(expected, abs=TOLERANCE)
    for layer in (0, 2):
        capture = found["captures"][f"{ROUTER}[{layer}]"]
        assert capture["positions"] == list(range(len(ids)))
        rows = torch.frombuffer(
            bytearray(base64.b64decode(capture["data"])), dtype=torch.float32
        )
        torch.testing.assert_close(
            rows.view(capture["shape"]), seen[layer], atol=TOLERANCE, rtol=0
        )
    for chosen in found["experts"]["chosen"]:
        top = seen[chosen["layer"]].topk(2, dim=-1).indices.tolist()
        assert [sorted(e) for e in chosen["experts"]] == [sorted(e) for e in top]
    if name == "gated":
        fired = int(opened[-1].sum())
        assert 0 < fired < len(ids)
        assert found["writes"][0]["tokens"] == fired
        assert found["gates"]["w"] == {"passed": fired, "evaluated": len(ids)}


def test_a_router_fused_with_another_gate_is_refused(models: Any):
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    original = MoERunner.__init__

    def fused(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._fse_fuse_gate = True

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SpecError, match=r"router\.logits\[0\].*shared expert's gate"),
    ):
        patch.setattr(MoERunner, "__init__", fused)
        patch.setattr(
            MoERunner,
            "_maybe_fuse_gate_weights",
            lambda self: setattr(self, "_combined_gate_weight", self.gate.weight),
        )
        with engine(models["qwen3_moe"], {"sites": [ROUTER]}):
            pass


def test_a_rank_that_sees_a_part_of_the_tokens_is_refused():
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    def runner(sequence_parallel: bool) -> Any:
        made = MoERunner.__new__(MoERunner)
        nn.Module.__init__(made)
        made.gate, made._fse_fuse_gate = nn.Linear(2, 4), False
        made._forward_entry = torch.ops.vllm.moe_forward
        made.moe_config = SimpleNamespace(is_sequence_parallel=sequence_parallel)
        return made

    layers = nn.ModuleList(
        nn.ModuleDict({"mlp": nn.ModuleDict({"gate": r.gate, "experts": r})})
        for r in (runner(False), runner(True))
    )
    root = nn.ModuleDict({"layers": layers})
    own, part = find_hidden_routers(root, "layers", sequence_parallel=False)
    assert (own.layer, own.module, own.reason) == (0, "layers.0.mlp.gate", None)
    assert "sequence parallelism" in str(part.reason)
    every = find_hidden_routers(root, "layers", sequence_parallel=True)
    assert all(router.reason for router in every)
