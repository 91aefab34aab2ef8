"""Models without a graph (`enforce_eager`): every site by a hook, judged like the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eyesplice import SpecError
from tests.engine import Answer, Ask, Engine, assert_judged, distance, engine, prompt
from tests.experts import routed, steered
from tests.integration import test_functions, test_sites
from tests.integration.test_functions import folder, oracle
from tests.oracle import Oracle
from tests.tiny_models import NAMES, NUM_LAYERS

__all__ = ["folder", "oracle"]

pytestmark = pytest.mark.engine

EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {}}
EXPERTS = ("mixtral", "qwen3_moe")
ADDING = ("gpt2", "opt")


@pytest.fixture(scope="module", params=NAMES)
def sites(request: Any, models: Any, vectors: Any) -> test_sites.World:
    arch = request.param
    cases = test_sites._cases(arch, vectors)
    config = {"vectors": str(vectors.folder), "sites": "all"}
    with engine(models[arch], config, **EAGER) as running:
        asks = [Ask(test_sites.PROMPT, case.spec) for case in cases.values()]
        plain, *answers = running.ask(Ask(test_sites.PROMPT), *asks)
        report = running.report
    named = dict(zip(cases, answers, strict=True))
    oracle_ = Oracle(models[arch])
    return test_sites.World(arch, report, plain, cases, named, oracle_)


def test_every_write_does_what_the_oracles_hook_does(sites: test_sites.World):
    test_sites.test_every_write_does_what_the_oracles_hook_does(sites)


def test_every_site_is_armed_by_a_module(sites: test_sites.World):
    report = sites.report
    assert not report.missing
    assert {row.form for row in report.rows} == {"module"}
    assert (report.num_boundary_ops, report.num_inline_ops) == (0, 0)
    experts = sites.arch in EXPERTS
    assert len(report.rows) == NUM_LAYERS * (8 + experts)
    hooks = 7 * NUM_LAYERS + 1 if sites.arch in ADDING else 3 * NUM_LAYERS + 1
    assert report.num_hooks == hooks + experts * NUM_LAYERS


@pytest.fixture(scope="module")
def functions(models: Any, folder: Path, oracle: Oracle) -> test_functions.World:
    asks = test_functions._asks()
    config = {"vectors": str(folder), "ops": "all", "capture_rows": 2048}
    batches = test_functions._batches
    with engine(models["llama"], config, **EAGER) as running:
        bare = {n: Ask(a.prompt, None, a.max_tokens) for n, a in asks.items()}
        plain = batches(running, bare)
        alone = {name: running.ask(ask)[0] for name, ask in asks.items()}
        mixed = batches(running, asks)
    few = {**EAGER, "max_num_batched_tokens": 24}
    with engine(models["llama"], config, **few) as running:
        chunked = batches(running, asks)
    return test_functions.World(oracle, plain, alone, mixed, chunked)


@pytest.mark.parametrize("way", test_functions.WAYS)
@pytest.mark.parametrize("name", test_functions.CASES)
def test_functions_do_what_hooks_do(
    functions: test_functions.World, name: str, way: str
):
    test_functions.test_the_answer_is_what_hooks_give(functions, name, way)


def test_steermoe_and_router_reads(models: Any, tmp_path: Path):
    from eyesplice.integration.apps import steermoe

    steermoe.app({0: [3], 2: [1]}, {0: [0], 1: [2, 3]}).save(tmp_path)
    reads = {"reads": [{"read": "router", "name": "r", "layers": [1]}]}
    model = models["qwen3_moe"]
    config = {"apps": str(tmp_path), "ops": "all", "sites": "all"}
    with engine(model, config, **EAGER) as running:
        asks = [Ask(prompt(12), s) for s in (None, "steermoe", reads)]
        plain, answer, read = running.ask(*asks)
    oracle_ = Oracle(model)
    edits = {0: steered([3], [0]), 1: steered([], [2, 3]), 2: steered([1], [])}
    with routed(oracle_.layers, edits):
        assert_judged(oracle_, answer)
    assert distance(answer, plain) > 1e-3
    with routed(oracle_.layers, {1: lambda z: z}) as seen:
        assert_judged(oracle_, read)
    top = seen[1].topk(2, dim=-1).indices
    (found,) = _listed(read.eyesplice["experts"]["r"])
    assert [sorted(e) for e in found["experts"]] == [sorted(e) for e in top.tolist()]


def test_a_named_site_that_is_missing_stops_the_start(models: Any):
    config = {"sites": ["residual.post", "router.logits"]}
    with (
        pytest.raises(SpecError, match=r"router\.logits\[0\].*has no experts"),
        engine(models["llama"], config, **EAGER),
    ):
        raise AssertionError("it started")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Exact:
    """bf16 answers of vanilla, of an idle engine, and of one with other requests."""

    vanilla: Sequence[Answer]
    idle: Sequence[Answer]
    mixed: Sequence[Answer]


ASKS = [Ask(prompt(9 + number, number), max_tokens=12) for number in range(6)]
BUSY: dict[int, dict[str, Any]] = {
    1: {"writes": [{"vector": "v0", "layers": "all", "submodule": "residual.mid"}]},
    3: {"reads": [{"read": "norm", "layers": "all", "submodule": "residual.post"}]},
    4: {"writes": [{"vector": "v1", "layers": [1], "submodule": "attention.pre"}]},
}


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def exact(request: Any, models: Any, vectors: Any) -> Exact:
    options = {**EAGER, "dtype": "bfloat16"}
    model = models[request.param]
    with engine(model, **options) as running:
        vanilla = running.ask(*ASKS)
        _assert_untouched(running)
    with engine(model, {"vectors": str(vectors.folder)}, **options) as running:
        idle = running.ask(*ASKS)
        busy = [
            Ask(ask.prompt, BUSY.get(i), ask.max_tokens) for i, ask in enumerate(ASKS)
        ]
        mixed = running.ask(*busy)
    return Exact(vanilla, idle, mixed)


def _modules(running: Engine) -> Iterator[torch.nn.Module]:
    worker = running._core.model_executor.driver_worker.worker
    yield from worker.model_runner.get_model().modules()


def _assert_untouched(running: Engine) -> None:
    """An engine that is not switched on has not one hook."""
    for module in _modules(running):
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in module.__dict__


def test_idle_is_vanilla_to_the_bit(exact: Exact):
    for mine, theirs in zip(exact.idle, exact.vanilla, strict=True):
        assert mine.tokens == theirs.tokens
        assert torch.equal(mine.logprobs, theirs.logprobs)


def test_neighbours_and_readers_are_vanilla_to_the_bit(exact: Exact):
    for number, theirs in enumerate(exact.vanilla):
        mine = exact.mixed[number]
        written = "writes" in BUSY.get(number, {})
        if written:
            assert distance(mine, theirs) > 1e-2
        else:
            assert mine.tokens == theirs.tokens
            assert torch.equal(mine.logprobs, theirs.logprobs)


def test_an_idle_step_calls_no_op(models: Any, monkeypatch: pytest.MonkeyPatch):
    from eyesplice.ops import contracts

    called = []

    def watch(name: str) -> None:
        op = getattr(contracts, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return op(*args, **kwargs)

        monkeypatch.setattr(contracts, name, counted)

    with engine(models["llama"], {}, **EAGER) as running:
        for name in ("boundary_", "inline_"):
            watch(name)
        running.ask(Ask(prompt(6)))
        assert not called
        reads = [{"read": "norm", "layers": [1], "submodule": "residual.post"}]
        running.ask(Ask(prompt(6), {"reads": reads}))
        assert called
