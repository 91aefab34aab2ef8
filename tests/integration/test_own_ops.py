"""Users' own ops in real engines, held against plain hooks: alone, mixed, gated, idle."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import eyesplice
from tests import functions as f
from tests import oracle as judge
from tests import user_ops
from tests.engine import (
    Answer,
    Ask,
    Engine,
    assert_judged,
    assert_same,
    distance,
    engine,
    prompt,
)
from tests.functions import Fn
from tests.oracle import SUBMODULES, Oracle
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS

pytestmark = pytest.mark.engine

MODULES = [user_ops.__name__]
FLAG = {"inductor_passes": {"post_grad_custom_post_pass": "eyesplice.splice_pass"}}
"""Its pass refuses to lower an op with a copy."""

MID, X = "residual.mid", "attention.post"


def _normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * 0.1


W, LAYERED, V = (
    _normal(3, HIDDEN_SIZE),
    _normal(NUM_LAYERS, 2, HIDDEN_SIZE),
    _normal(HIDDEN_SIZE),
)


def bend(weight: torch.Tensor, scale: float) -> judge.Edit:
    return lambda h, positions, n: h + scale * torch.tanh(h @ weight.T) @ weight


def own(
    weight: Any, scale: float, layers: object, submodule: str, name: str = "own"
) -> Any:
    function = eyesplice.write("userops::bend", name=name, weight=weight, scale=scale)
    return function.layers(layers).submodule(submodule)


def _app(name: str, *functions: Any, **more: Any) -> eyesplice.App:
    return eyesplice.App(name, list(functions), **more)


READ_X = eyesplice.read("dot", name="x", weight=V * 10).layers(2).submodule(X)
READ_H = eyesplice.read("dot", name="h", weight=V * 10).layers(2).submodule(MID)
APPS = {
    **{s: _app(f"at-{i}", own(W, 2.0, 1, s)) for i, s in enumerate(SUBMODULES)},
    "layered": _app("layered", own(LAYERED, -1.5, "all", "residual.post")),
    "gated": _app(
        "gated",
        READ_X,
        READ_H,
        own(W, 2.0, 2, X).cond(when="positions(2:)", gate="x >= 0"),
        own(W, 3.0, 2, MID, "late").cond("not last_token", "h < 0"),
    ),
    "mixed": _app(
        "mixed",
        own(W, 2.0, 1, MID),
        eyesplice.write("steering_vector", vector=V * 10, scale=1.5)
        .layers(1)
        .submodule(MID),
        eyesplice.write("userops::drift", scale=0.3).layers(3).submodule("mlp.post"),
    ),
}
FUNCTIONS: dict[str, list[Fn]] = {
    **{s: [Fn("own", s, [1], edit=bend(W, 2.0))] for s in SUBMODULES},
    "layered": [
        Fn(f"own{i}", "residual.post", [i], edit=bend(LAYERED[i], -1.5))
        for i in range(NUM_LAYERS)
    ],
    "gated": [
        Fn("x", X, [2], read=f.probe(V * 10)),
        Fn("h", MID, [2], read=f.probe(V * 10)),
        Fn("own", X, [2], edit=bend(W, 2.0), when=judge.positions(2, 999),
           gate=f.score("x", 2, lambda x: x >= 0)),
        Fn("late", MID, [2], edit=bend(W, 3.0),
           when=lambda p, n: ~judge.last_token(p, n),
           gate=f.score("h", 2, lambda x: x < 0)),
    ],
    # Built-in writes of a value come before users' own, in whatever order they stand.
    "mixed": [
        Fn("steer", MID, [1], edit=judge.add(V * 10, 1.5)),
        Fn("own", MID, [1], edit=bend(W, 2.0)),
        Fn("drift", "mlp.post", [3], edit=lambda h, p, n: h + 0.3),
    ],
}  # fmt: skip
ASKS = {
    name: Ask(prompt(6 + i, 60 + i), APPS[name].name, max_tokens=5)
    for i, name in enumerate(APPS)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The apps, a folder each."""
    path = tmp_path_factory.mktemp("apps")
    for app in APPS.values():
        app.save(path / app.name)
    return path


def _config(folder: Path, names: Sequence[str] = tuple(APPS)) -> dict[str, object]:
    apps = [str(folder / APPS[name].name) for name in names]
    return {"apps": apps, "op_modules": MODULES}


@pytest.fixture(scope="module")
def running(models: Any, folder: Path) -> Iterator[Engine]:
    with engine(models["llama"], _config(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def alone(running: Engine) -> dict[str, Answer]:
    return dict(zip(ASKS, running.alone(*ASKS.values()), strict=True))


def _assert_as_hooks(oracle: Oracle, name: str, answer: Answer) -> f.Run:
    tokens = len(answer.prompt) + len(answer.tokens) - 1
    run, hooks = f.interventions(FUNCTIONS[name], tokens, len(answer.prompt))
    assert_judged(oracle, answer, *hooks, label=name)
    return run


@pytest.mark.parametrize("name", APPS)
def test_it_does_what_hooks_do(
    name: str, running: Engine, alone: dict[str, Answer], llama_oracle: Oracle
) -> None:
    run = _assert_as_hooks(llama_oracle, name, alone[name])
    (plain,) = running.ask(Ask(ASKS[name].prompt, max_tokens=5))
    assert distance(plain, alone[name]) > 1e-2
    for receipt in alone[name].eyesplice["writes"]:
        label = receipt["function"].rpartition("/")[2]
        if name == "gated":
            fired = int(run.fired[label].sum())
            gate = alone[name].eyesplice["gates"][f"gated/{label}"]
            assert receipt["tokens"] == gate["passed"] == fired
            assert gate["evaluated"] == int(run.evaluated[label].sum())
            assert 0 < fired < gate["evaluated"]
        else:
            assert receipt["tokens"] == len(run.positions)


def test_a_mixed_batch_answers_as_each_alone(
    running: Engine, alone: dict[str, Answer]
) -> None:
    plain = [Ask(prompt(5 + n, 90 + n), max_tokens=7) for n in range(4)]
    expected = running.alone(*plain)
    answers = running.ask(*ASKS.values(), *plain)
    for name, answer in zip(ASKS, answers, strict=False):
        assert_same(answer, alone[name], label=name)
        assert answer.eyesplice["writes"] == alone[name].eyesplice["writes"]
    for answer, solo in zip(answers[len(ASKS) :], expected, strict=True):
        assert_same(answer, solo)


def test_idle_it_answers_as_vllm(running: Engine, vanilla: Engine) -> None:
    asks = [Ask(prompt(5 + 3 * n, n), max_tokens=16) for n in range(6)]
    for mine, theirs in zip(running.ask(*asks), vanilla.ask(*asks), strict=True):
        assert_same(mine, theirs, 1e-5)


def test_a_request_can_say_another_scale(running: Engine, llama_oracle: Oracle) -> None:
    spec = {"apps": {APPS[MID].name: {"scale": -0.7}}}
    (answer,) = running.ask(Ask(prompt(8, 5), spec))
    edit = judge.Intervention(MID, 1, bend(W, -0.7))
    assert_judged(llama_oracle, answer, edit)


def test_a_requests_own_write_can_use_what_an_app_has_brought(
    running: Engine, llama_oracle: Oracle
) -> None:
    name = APPS[MID].name
    write = {"write": "userops::bend", "weight": _tensor_of(running, name),
             "scale": 0.9, "layers": [1], "submodule": MID, "when": "prompt"}  # fmt: skip
    (answer,) = running.ask(Ask(prompt(8, 6), {"writes": [write]}))
    edit = judge.where(bend(W, 0.9), judge.prompt)
    assert_judged(llama_oracle, answer, judge.Intervention(MID, 1, edit))
    for wrong in (
        {"layers": [0]},
        {"weight": _tensor_of(running, "layered")},
        {"write": "userops::rounds_idle_rows"},
        {"write": "no::op"},
        {"preserve_norm": True},
    ):
        with pytest.raises(eyesplice.SpecError, match=r"app|preserve_norm"):
            running.ask(Ask(prompt(8, 6), {"writes": [write | wrong]}))
    with pytest.raises(eyesplice.SpecError, match="each once"):
        running.ask(Ask(prompt(8, 6), {"writes": [write] * 9}))


def _tensor_of(running: Engine, app: str) -> str:
    names = [info.name for info in eyesplice.deployed(running.llm).vectors()]
    return next(name for name in names if name.startswith(f"{app}/"))


def test_the_site_table_shows_them(running: Engine) -> None:
    custom = {str(row.site): row.custom for row in running.report.rows if row.custom}
    assert custom["mlp.pre[1]"] == ("userops::bend",)
    assert custom["mlp.post[3]"] == ("userops::drift",)
    assert custom["residual.mid[1]"] == ("userops::bend",) * 2
    assert running.report.num_custom_ops == sum(map(len, custom.values())) == 15
    assert not running.report.missing


def test_inspect_shows_them_too(models: Any, folder: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    words = ["inspect", "--model", str(models["llama"]), "--json", "--sites", MID]
    words += ["--app", str(folder / APPS[MID].name), "--op-module", MODULES[0]]
    done = subprocess.run(
        [sys.executable, "-m", "eyesplice.integration.cli.main", *words],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ops"]["custom"] == 1
    shown = {site["layer"]: site["custom"] for site in found["sites"]}
    assert shown == {0: [], 1: ["userops::bend"], 2: [], 3: []}


def test_gpt2_where_every_site_is_inline(models: Any, folder: Path) -> None:
    names = [*SUBMODULES, "mixed"]
    asks = [ASKS[name] for name in names]
    plain = [Ask(prompt(7 + n, n), max_tokens=9) for n in range(3)]
    with engine(models["gpt2"]) as theirs:
        vanilla = theirs.ask(*plain)
    oracle = Oracle(models["gpt2"])
    with engine(models["gpt2"], _config(folder, names)) as mine:
        answers = mine.ask(*asks, *plain)
        assert mine.report.num_boundary_ops == 0
        assert mine.report.num_custom_ops == 9
    for name, answer in zip(names, answers, strict=False):
        _assert_as_hooks(oracle, name, answer)
    for answer, expected in zip(answers[len(names) :], vanilla, strict=True):
        assert_same(answer, expected, 1e-5)


def test_inductor_cold_and_warm(
    models: Any, folder: Path, llama_oracle: Oracle, vanilla: Engine
) -> None:
    names = ["attention.post", "residual.mid", "mlp.pre", "residual.post", "gated"]
    plain = Ask(prompt(9), max_tokens=9)
    for _ in range(2):
        torch.compiler.reset()
        config = _config(folder, names)
        with engine(models["llama"], config, compilation_config=FLAG) as found:
            *answers, idle = found.ask(*(ASKS[name] for name in names), plain)
        for name, answer in zip(names, answers, strict=True):
            _assert_as_hooks(llama_oracle, name, answer)
        assert_same(idle, vanilla.ask(plain)[0])


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("rounds_idle_rows", "changes rows whose gain is 0"),
        ("mixes_rows", "other tokens hold NaN"),
    ],
)
def test_an_op_that_breaks_the_contract_stops_the_start(
    op: str, said: str, models: Any, tmp_path: Path
) -> None:
    function = eyesplice.write(f"userops::{op}", weight=W).layers(1)
    _app("bad", function).save(tmp_path / "bad")
    config = {"apps": [str(tmp_path / "bad")], "op_modules": MODULES}
    with (
        pytest.raises(eyesplice.SpecError, match=f"userops::{op} .*{said}"),
        engine(models["llama"], config),
    ):
        pass


def test_an_op_of_ones_own_needs_a_graph(models: Any, tmp_path: Path) -> None:
    function = eyesplice.write("userops::bend", weight=W).layers(1)
    _app("bad", function).save(tmp_path / "bad")
    config = {"apps": [str(tmp_path / "bad")], "op_modules": MODULES}
    with (
        pytest.raises(eyesplice.SpecError, match="needs the value in a graph"),
        engine(models["llama"], config, enforce_eager=True),
    ):
        pass
