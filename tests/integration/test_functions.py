"""Every read, write, condition and gate does what hooks do: alone, mixed, in chunks."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import functions as f
from tests import oracle as judge
from tests.engine import Answer, Ask, Engine, assert_judged, distance, engine, prompt
from tests.functions import Fn, Run
from tests.oracle import Oracle
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS

pytestmark = pytest.mark.engine

POST, MID, PRE = "residual.post", "residual.mid", "residual.pre"
TOKENS = 7
LISTED = list(range(0, 512, 3))[:60]


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "steer": normal(HIDDEN_SIZE),
        "other": normal(HIDDEN_SIZE),
        "probe": normal(HIDDEN_SIZE),
        "second": normal(HIDDEN_SIZE),
        "center": normal(HIDDEN_SIZE),
        "layered": normal(NUM_LAYERS, HIDDEN_SIZE),
        "u": normal(3, HIDDEN_SIZE) * 0.3,
        "v": normal(3, HIDDEN_SIZE) * 0.1,
        "b": normal(3),
        "m": normal(HIDDEN_SIZE) * 0.3,
        "encoder": normal(5, HIDDEN_SIZE),
        "feature": normal(HIDDEN_SIZE),
        "decoder": normal(HIDDEN_SIZE) * 0.3,
    }


T = _tensors()


@dataclass
class Level:
    """Thresholds of a gate: medians of what it looks at, over the case's own prompt.

    `how` and `over` name the reduction of the probe that it looks at, if it does.
    """

    how: str | None = None
    over: str = "request"
    t: float = 0.0
    s: float = 0.0


@dataclass(frozen=True)
class Case:
    """A request, and the functions that it means for given prompt and answer."""

    spec: Callable[[], dict[str, Any]]
    functions: Callable[[Sequence[int]], list[Fn]]
    steers: bool = True
    level: Level = field(default_factory=Level)


def write(kernel: str, layers: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"write": kernel, "layers": list(layers), **more}


def read(kernel: str, name: str, layers: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"read": kernel, "name": name, "layers": list(layers), **more}


def _one_write(
    entry: dict[str, Any], edit: judge.Edit, submodule: str = POST, **more: Any
) -> Case:
    entry = {"submodule": submodule, "name": "w", **entry}
    return Case(
        lambda: {"writes": [entry]},
        lambda ids: [Fn("w", submodule, entry["layers"], edit=edit, **more)],
    )


def _one_read(
    entry: dict[str, Any], row: f.ReadRow | None, submodule: str = POST, **more: Any
) -> Case:
    entry = {"submodule": submodule, **entry}
    return Case(
        lambda: {"reads": [entry]},
        lambda ids: [Fn(entry["name"], submodule, entry["layers"], read=row, **more)],
        steers=False,
    )


def _gated(
    gate_text: Callable[[float, float], str],
    gate: Callable[[float, float], f.Gate],
    layers: Sequence[int] = (2, 3),
    *,
    when: str = "all",
    mask: judge.Mask = judge.all_tokens,
    level: Level | None = None,
) -> Case:
    """A write, and a read that shows where the gate was open, behind two probes."""
    level = level or Level()
    probe = {"over": level.over} if level.how else {}

    def thresholds() -> tuple[float, float]:
        return level.t, level.s

    def spec() -> dict[str, Any]:
        text = gate_text(*thresholds())
        place = {"layers": list(layers), "submodule": POST, "when": when}
        return {
            "reads": [
                read("probe", "p", [0], submodule=POST, weight="probe", **probe),
                read("dot", "q", [1], submodule=MID, weight="second"),
                read("norm", "open", [layers[0]], submodule=MID, gate=text, when=when),
            ],
            "writes": [
                {
                    **place,
                    "write": "steering_vector",
                    "vector": "steer",
                    "name": "w",
                    "scale": 1.5,
                    "gate": text,
                },
            ],
        }

    def functions(ids: Sequence[int]) -> list[Fn]:
        opened = gate(*thresholds())
        return [
            Fn("p", POST, [0], read=f.probe(T["probe"])),
            Fn("q", MID, [1], read=f.probe(T["second"])),
            Fn("open", MID, [layers[0]], read=f.norm(), when=mask, gate=opened),
            Fn("w", POST, layers, edit=judge.add(T["steer"], 1.5), when=mask,
               gate=opened),
        ]  # fmt: skip

    return Case(spec, functions, level=level)


def _p(test: str, t: float) -> f.Gate:
    return f.score("p", 0, f.COMPARISONS[test](t))


def _q(test: str, t: float) -> f.Gate:
    return f.score("q", 1, f.COMPARISONS[test](t))


def _reduced(how: str, over: str, test: str, t: float) -> f.Gate:
    return f.reduced("p", 0, how, over, f.COMPARISONS[test](t))


def _token_in(text: str, make: Callable[[judge.Mask], judge.Mask]) -> Case:
    entry = write("steering_vector", [1, 2], vector="steer", scale=2.0, name="w",
                  submodule=POST, when=text)  # fmt: skip
    return Case(
        lambda: {"writes": [entry]},
        lambda ids: [
            Fn("w", POST, [1, 2], edit=judge.add(T["steer"], 2.0),
               when=make(f.token_in(ids, LISTED)))
        ],
    )  # fmt: skip


_WRITES = {
    "affine": _one_write(
        write("affine", [1, 3], u="u", v="v", bias="b", scale=0.7),
        f.affine(T["u"], T["v"], T["b"], 0.7),
    ),
    "affine at mlp.post": _one_write(
        write("affine", [0], u="u", v="v"), f.affine(T["u"], T["v"]), "mlp.post"
    ),
    "replace": _one_write(
        write("replace", [2], vector="steer", scale=0.4), f.replace(T["steer"], 0.4)
    ),
    "replace at attention.post": _one_write(
        write("replace", [1], vector="other", scale=1.0, when="generated"),
        f.replace(T["other"], 1.0),
        "attention.post",
        when=judge.generated,
    ),
    "mask": _one_write(write("mask", [0, 2], vector="m", scale=0.8), f.mask(T["m"], 0.8)),
    "feature_clamp": _one_write(
        write("feature_clamp", [1], vector="decoder", weight="feature", bias=0.2,
              threshold=0.5, value=3.0),
        f.feature_clamp(T["decoder"], T["feature"], 0.2, 0.5, 3.0),
    ),
    "preserve_norm": _one_write(
        write("steering_vector", [1, 2], vector="steer", scale=3.0, preserve_norm=True),
        f.norm_preserved(judge.add(T["steer"], 3.0)),
    ),
    "preserve_norm of an ablation": _one_write(
        write("ablate", [3], vector="other", preserve_norm=True),
        f.norm_preserved(judge.ablate(T["other"])),
        MID,
    ),
}  # fmt: skip

_READS = {
    "probe": _one_read(
        read("probe", "r", [0, 3], weight="probe", bias=-0.3), f.probe(T["probe"], -0.3)
    ),
    "sigmoid probe": _one_read(
        read("probe", "r", [2], weight="probe", bias=0.1, function="sigmoid",
             when="generated"),
        f.probe(T["probe"], 0.1, sigmoid=True),
        when=judge.generated,
    ),
    "dot at attention.post": _one_read(
        read("dot", "r", [1], weight="second"), f.probe(T["second"]), "attention.post"
    ),
    "cosine at mlp.pre": _one_read(
        read("cosine", "r", [2], weight="probe"), f.cosine(T["probe"]), "mlp.pre"
    ),
    "norm": _one_read(read("norm", "r", [0, 1, 2, 3]), f.norm(), MID),
    "distance": _one_read(
        read("distance", "r", [3], weight="center", when="last_token"),
        f.distance_to(T["center"]),
        when=judge.last_token,
    ),
    "tanh_cosine": _one_read(
        read("tanh_cosine", "r", [1], weight="second", when="prompt"),
        f.tanh_cosine(T["second"]),
        PRE,
        when=judge.prompt,
    ),
    "layered dot": Case(
        lambda: {"reads": [read("dot", f"r{n}", [n], weight="layered", submodule=POST)
                           for n in (0, 2)]},
        lambda ids: [Fn(f"r{n}", POST, [n], read=f.probe(T["layered"][n]))
                     for n in (0, 2)],
        steers=False,
    ),
    "sae": _one_read(
        read("sae", "r", [1], weight="encoder", bias=0.1, function="jump_relu",
             threshold=0.4),
        f.sae(T["encoder"], 0.1, 0.4),
    ),
    "capture": _one_read(read("capture", "c", [0, 2], when="prompt"), None,
                         when=judge.prompt),
    "capture at attention.pre": _one_read(
        read("capture", "c", [1], when="positions(-3:)"), None, "attention.pre",
        when=lambda p, n: p >= n - 3,
    ),
}  # fmt: skip

_GATES = {
    "own score": _gated(lambda t, s: f"p >= {t!r}", lambda t, s: _p(">=", t)),
    "by kernel and layer": _gated(
        lambda t, s: f"probe(layer=0) < {t!r}", lambda t, s: _p("<", t)
    ),
    "and, or, not": _gated(
        lambda t, s: f"p > {t!r} and not (q > {s!r}) or {s!r} <= q and p <= {t!r}",
        lambda t, s: f.either(
            f.both(_p(">", t), f.negated(_q(">", s))),
            f.both(_q(">=", s), _p("<=", t)),
        ),
    ),
    "mean over the prompt": _gated(
        lambda t, s: f"p.mean > {t - 0.5!r}",
        lambda t, s: _reduced("mean", "prompt", ">", t - 0.5),
        level=Level("mean", "prompt"),
    ),
    "max over what was generated": _gated(
        lambda t, s: f"p.max > {t!r}",
        lambda t, s: _reduced("max", "generated", ">", t),
        level=Level("max", "generated"),
    ),
    "running mean": _gated(
        lambda t, s: f"p.mean >= {t!r}",
        lambda t, s: _reduced("mean", "request", ">=", t),
        level=Level("mean", "request"),
    ),
    "last": _gated(
        lambda t, s: f"p.last < {t!r}",
        lambda t, s: _reduced("last", "request", "<", t),
        level=Level("last", "request"),
    ),
    "latch": _gated(
        lambda t, s: f"latch(p > {t!r})",
        lambda t, s: f.latch(_p(">", t)),
        level=Level("max", "request"),
    ),
    "latch and own score": _gated(
        lambda t, s: f"latch(p > {t!r}) and q < {s!r}",
        lambda t, s: f.both(f.latch(_p(">", t)), _q("<", s)),
        when="positions(3:)",
        mask=lambda p, n: p >= 3,
        level=Level("max", "request"),
    ),
}  # fmt: skip

_IDS = ", ".join(map(str, LISTED))
_TOKENS = {
    "token_in": _token_in(f"token_in({_IDS})", lambda m: m),
    "token_in and generated": _token_in(
        f"generated and token_in([{_IDS}])", lambda m: f.all_of(m, judge.generated)
    ),
    "after": _token_in(f"after(token_in({_IDS}))", f.after),
    "not after": _token_in(
        f"not after(token_in({_IDS})) and positions(2:)",
        lambda m: f.all_of(lambda p, n: ~f.after(m)(p, n), judge.positions(2, 9999)),
    ),
}

CASES: dict[str, Case] = {**_WRITES, **_READS, **_GATES, **_TOKENS}


@pytest.fixture(scope="module")
def oracle(models: Any) -> Oracle:
    found = Oracle(models["llama"])
    reads = [
        Fn("p", POST, [0], read=f.probe(T["probe"])),
        Fn("q", MID, [1], read=f.probe(T["second"])),
    ]
    for name, ask in _asks().items():
        if name in _GATES:
            level = CASES[name].level
            ids = [*ask.prompt, *found.generate(ask.prompt, ask.max_tokens)]
            run, hooks = f.interventions(reads, len(ids), len(ask.prompt))
            found.logprobs(ids, len(ask.prompt), hooks)
            values = run.scores["p", 0]
            if level.how:
                values = f.reduction(run, "p", 0, level.how, level.over)
            level.t = _between(values)
            level.s = _between(run.scores["q", 1])
    return found


def _between(values: Tensor) -> float:
    """Between the two middle values, so that no rounding decides."""
    found = values[~values.isnan()].unique()
    middle = len(found) // 2
    return float(found[max(middle - 1, 0) : middle + 1].mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("function-vectors")
    for name, tensor in T.items():
        save_file({"tensor": tensor}, made / f"{name}.safetensors")
    return made


def _asks() -> dict[str, Ask]:
    return {
        name: Ask(
            prompt(9 + 2 * (number % 12), 300 + number),
            case.spec(),
            TOKENS + number % 5,
            prompt_logprobs=True,
        )
        for number, (name, case) in enumerate(CASES.items())
    }


def _batches(running: Engine, asks: Mapping[str, Ask]) -> dict[str, Answer]:
    names = list(asks)
    answers: dict[str, Answer] = {}
    for first in range(0, len(names), 16):
        some = names[first : first + 16]
        answers |= zip(some, running.ask(*(asks[n] for n in some)), strict=True)
    return answers


@dataclass(frozen=True)
class World:
    """Answers to every case: alone, in batches of 16, and with prompts in chunks."""

    oracle: Oracle
    plain: dict[str, Answer]
    alone: dict[str, Answer]
    mixed: dict[str, Answer]
    chunked: dict[str, Answer]


@pytest.fixture(scope="module")
def world(models: Any, folder: Path, oracle: Oracle) -> World:
    asks = _asks()
    config = {"vectors": str(folder), "ops": "all", "capture_rows": 2048}
    with engine(models["llama"], config) as running:
        bare = {n: Ask(a.prompt, None, a.max_tokens) for n, a in asks.items()}
        plain = _batches(running, bare)
        alone = {name: running.ask(ask)[0] for name, ask in asks.items()}
        mixed = _batches(running, asks)
    with engine(models["llama"], config, max_num_batched_tokens=24) as running:
        chunked = _batches(running, asks)
    return World(oracle, plain, alone, mixed, chunked)


WAYS = ("alone", "mixed", "chunked")


def _judge(world: World, name: str, way: str) -> tuple[Run, Answer]:
    answer: Answer = getattr(world, way)[name]
    ids = [*answer.prompt, *answer.tokens][:-1]
    run, hooks = f.interventions(
        CASES[name].functions(ids), len(ids), len(answer.prompt)
    )
    assert_judged(world.oracle, answer, *hooks, label=f"{way}: {name}")
    return run, answer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_what_hooks_give(world: World, name: str, way: str):
    run, answer = _judge(world, name, way)
    moved = distance(answer, world.plain[name])
    assert moved > 1e-3 if CASES[name].steers else moved <= 1e-5
    found = answer.eyesplice
    assert found is not None
    for (function, layer), expected in run.scores.items():
        _check_scores(found, function, layer, expected)
    for (function, layer), rows in run.rows.items():
        _check_capture(found, layer, rows, run.fired[function], name)
    for function in (w for w in run.evaluated):
        _check_receipt(found, function, run)


def _check_scores(
    found: Mapping[str, Any], name: str, layer: int, expected: Tensor
) -> None:
    rows = expected[:, None] if expected.dim() == 1 else expected
    counted = ~rows[:, 0].isnan()
    reported = found["scores"].get(name, [])
    if isinstance(reported, Mapping):
        reported = [reported]
    (one,) = [item for item in reported if item["layer"] == layer]
    assert one["positions"] == counted.nonzero()[:, 0].tolist()
    if one["positions"]:
        values = torch.tensor(one["values"]).reshape(len(one["positions"]), -1)
        torch.testing.assert_close(values, rows[counted].float(), atol=1e-4, rtol=1e-4)


def _check_capture(
    found: Mapping[str, Any], layer: int, rows: Tensor, chosen: Tensor, case: str
) -> None:
    hook = "ln1.hook_normalized" if "attention.pre" in case else "hook_resid_post"
    one = found["captures"][f"blocks.{layer}.{hook}"]
    assert one["positions"] == chosen.nonzero()[:, 0].tolist()
    assert one["shape"] == [len(one["positions"]), HIDDEN_SIZE]
    assert one["dtype"] == "float32"
    data = bytearray(base64.b64decode(one["data"]))
    values = torch.frombuffer(data, dtype=torch.float32).reshape(one["shape"])
    torch.testing.assert_close(values, rows[chosen], atol=1e-4, rtol=1e-4)


def _check_receipt(found: Mapping[str, Any], name: str, run: Run) -> None:
    (one,) = [item for item in found["writes"] if item["function"] == name]
    fired, evaluated = run.fired[name], run.evaluated[name]
    assert one["tokens"] == int(fired.sum())
    if name in found.get("gates", {}):
        gates = found["gates"][name]
        assert gates == {"passed": int(fired.sum()), "evaluated": int(evaluated.sum())}


@pytest.mark.parametrize("name", _GATES)
def test_a_gate_opens_on_some_tokens_and_not_on_others(world: World, name: str):
    run, _ = _judge(world, name, "mixed")
    assert 0 < int(run.fired["w"].sum()) < int(run.evaluated["w"].sum())


def test_twenty_repetitions_give_one_answer(models: Any, folder: Path, oracle: Oracle):
    names = [*_GATES][:6]
    asks = {name: ask for name, ask in _asks().items() if name in names}
    with engine(models["llama"], {"vectors": str(folder), "ops": "all"}) as running:
        first = _batches(running, asks)
        for _ in range(19):
            for name, answer in _batches(running, asks).items():
                assert answer.tokens == first[name].tokens
                assert answer.eyesplice["gates"] == first[name].eyesplice["gates"]
                assert (
                    answer.eyesplice["scores"]["open"]["positions"]
                    == first[name].eyesplice["scores"]["open"]["positions"]
                )
