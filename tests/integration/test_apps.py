"""Apps in one engine: named, by default, overridden, switched; each answer is judged."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eyesplice
from eyesplice import App, SpecError
from tests import oracle as judge
from tests.engine import Ask, Engine, assert_judged, assert_same, engine, prompt
from tests.oracle import Intervention, Oracle
from tests.tiny_models import HIDDEN_SIZE

pytestmark = pytest.mark.engine

PROMPT = prompt(9)
SCALE = 1.5


def _vector(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HIDDEN_SIZE, generator=generator)


PUSHED, REMOVED, WATCHED = map(_vector, (1, 2, 3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three apps: `push` adds a vector, `remove` ablates one, `watch` reads a score."""
    push = eyesplice.write("steering_vector", vector=PUSHED, scale=SCALE, name="main")
    remove = eyesplice.write("ablate", vector=REMOVED)
    watch = eyesplice.read("dot", weight=WATCHED, name="score")
    apps = [
        App("push", [push.layers(1).submodule("residual.post")]),
        App("remove", [remove.layers([0, 2]).submodule("attention.post")]),
        App("watch", [watch.layers(2).submodule("residual.post")]),
    ]
    root = tmp_path_factory.mktemp("apps")
    for app in apps:
        app.save(root / app.name)
    return [str(root / app.name) for app in apps]


@pytest.fixture(scope="module")
def served(models: Mapping[str, Path], folders: list[str]) -> Iterator[Engine]:
    with engine(models["llama"], {"apps": folders, "default": "push"}) as running:
        yield running


@pytest.fixture
def handle(served: Engine) -> Iterator[Any]:
    """The engine's apps, all switched on again afterwards."""
    found = eyesplice.deployed(served.llm)
    yield found
    for app in found.apps():
        found.enable(app.name)


def _push(scale: float = SCALE) -> Intervention:
    return Intervention("residual.post", 1, judge.add(PUSHED, scale))


REMOVALS = [
    Intervention("attention.post", layer, judge.ablate(REMOVED)) for layer in (0, 2)
]
SPECS: dict[str, tuple[object, list[Intervention]]] = {
    "default": (None, [_push()]),
    "off": ("off", []),
    "by name": ("push", [_push()]),
    "another": ("remove", REMOVALS),
    "override": ({"apps": {"push": {"scale": -2.0}}}, [_push(-2.0)]),
    "override of one function": (
        {"apps": {"push": {"functions": {"main": {"scale": 0.5}}}}},
        [_push(0.5)],
    ),
    "two at once": ({"apps": {"push": {}, "remove": {}}}, [_push(), *REMOVALS]),
}


@pytest.fixture(scope="module")
def answers(served: Engine) -> dict[str, Any]:
    """The answers to all of SPECS, served in one batch."""
    asks = [Ask(PROMPT, spec) for spec, _ in SPECS.values()]
    return dict(zip(SPECS, served.ask(*asks), strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_each_request_gets_its_own_apps(
    answers: dict[str, Any], llama_oracle: Oracle, name: str
) -> None:
    assert_judged(llama_oracle, answers[name], *SPECS[name][1], label=name)


def test_a_disabled_app_is_refused_and_a_disabled_default_is_left_out(
    served: Engine, handle: Any, llama_oracle: Oracle
) -> None:
    handle.disable("push")
    with pytest.raises(SpecError, match="push"):
        served.ask(Ask(PROMPT, "push"))
    assert_judged(llama_oracle, served.ask(Ask(PROMPT))[0])
    assert_judged(llama_oracle, served.ask(Ask(PROMPT, "remove"))[0], *REMOVALS)
    handle.enable("push")
    assert_judged(llama_oracle, served.ask(Ask(PROMPT, "push"))[0], _push())
    with pytest.raises(SpecError, match="push, remove, watch"):
        handle.disable("missing")


def test_what_is_deployed_can_be_seen(handle: Any, folders: list[str]) -> None:
    push, remove, watch = handle.apps()
    assert (push.name, push.enabled, push.default) == ("push", True, True)
    assert push.functions == ("push/main",)
    assert remove.functions == ("remove/0",) and not remove.default
    assert push.digest == eyesplice.load_app(folders[0]).digest
    handle.disable("watch")
    assert [app.enabled for app in handle.apps()] == [True, True, False]
    assert watch.enabled
    assert {info.name.split("/")[0] for info in handle.vectors()} == {
        "push",
        "remove",
        "watch",
    }
    assert all(row.form for row in handle.sites())


def test_an_unknown_app_is_refused_by_name(served: Engine) -> None:
    with pytest.raises(SpecError, match=r"psuh.*push"):
        served.ask(Ask(PROMPT, "psuh"))


def test_answers_say_what_was_done(served: Engine) -> None:
    from vllm import SamplingParams

    def ask(spec: object) -> Any:
        extra = None if spec is None else {"eyesplice": spec}
        params = SamplingParams(
            max_tokens=4, temperature=0, detokenize=False, extra_args=extra
        )
        given = [{"prompt_token_ids": PROMPT}]
        return served.llm.generate(given, params, use_tqdm=False)[0].eyesplice

    tokens = len(PROMPT) + 3
    assert ask("off") is None
    found = ask(None)
    assert found["apps"] == ["push"]
    assert found["writes"] == [
        {
            "function": "push/main",
            "layers": [1],
            "submodule": "residual.post",
            "tokens": tokens,
        }
    ]
    found = ask({"apps": {"watch": {}, "remove": {}}})
    assert found["apps"] == ["watch", "remove"]
    assert found["scores"]["watch/score"]["positions"] == list(range(tokens))


def test_unsteered_serves_what_it_cannot_do_and_says_so(
    models: Mapping[str, Path], folders: list[str], vanilla: Engine
) -> None:
    config = {"apps": folders[:1], "on_error": "unsteered"}
    with engine(models["llama"], config) as running:
        asks = Ask(PROMPT, "missing"), Ask(PROMPT, "{broken"), Ask(PROMPT)
        for answer in running.ask(*asks):
            assert_same(answer, vanilla.ask(Ask(PROMPT))[0])
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=2, detokenize=False, extra_args={"eyesplice": "missing"}
        )
        given = [{"prompt_token_ids": PROMPT}]
        found = running.llm.generate(given, params, use_tqdm=False)[0].eyesplice
        assert "missing" in found["error"] and found["writes"] == []


def test_an_engine_without_eyesplice_has_nothing_deployed(vanilla: Engine) -> None:
    for engine_like in (vanilla.llm, object()):
        with pytest.raises(SpecError, match="switched on"):
            eyesplice.deployed(engine_like)
