"""Weights that are loaded anew: the tables stay where the compiled graph finds them."""

import pytest

from tests.engine import Ask, Engine, asking, assert_judged, prompt, write
from tests.oracle import Intervention, Oracle, add

pytestmark = pytest.mark.engine

LAYER = 1


def assert_steers(llama: Engine, oracle: Oracle, vectors, seed: int) -> None:
    ask = Ask(prompt(9, seed), asking(write("v0", [LAYER])))
    (answer,) = llama.ask(ask)
    edit = Intervention("residual.post", LAYER, add(vectors["v0"]))
    assert_judged(oracle, answer, edit)


def test_an_engine_steers_after_weights_are_loaded_anew(llama, llama_oracle, vectors):
    llama.llm.collective_rpc("reload_weights")
    assert_steers(llama, llama_oracle, vectors, 1)


def test_buffers_that_a_load_took_away_are_back(
    llama, llama_oracle, vectors, monkeypatch
):
    """vLLM 0.25.1 puts nothing back into layers that have no weights of their own."""
    runner = llama._core.model_executor.driver_worker.worker.model_runner
    taken = []

    def reload_weights() -> None:
        for module in runner.get_model().modules():
            for name in [n for n in module._buffers if n.startswith("eyesplice")]:
                taken.append(name)
                delattr(module, name)

    monkeypatch.setattr(runner, "reload_weights", reload_weights)
    llama.llm.collective_rpc("reload_weights")
    assert taken
    assert_steers(llama, llama_oracle, vectors, 2)
