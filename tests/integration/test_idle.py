"""An engine that is spliced and asked for nothing answers as vLLM itself does."""

import pytest

import eyesplice
from tests.engine import Ask, Engine, asking, assert_same, engine, prompt, write

pytestmark = pytest.mark.engine

ASKS = [Ask(prompt(5 + 3 * number, number), max_tokens=16) for number in range(8)]


def test_an_idle_llama_answers_as_vllm(llama: Engine, vanilla: Engine):
    for mine, theirs in zip(llama.ask(*ASKS), vanilla.ask(*ASKS), strict=True):
        assert_same(mine, theirs, 1e-5)


@pytest.mark.parametrize("arch", ["qwen3", "mixtral"])
def test_another_idle_model_answers_as_vllm(arch: str, models):
    with engine(models[arch]) as running:
        theirs = running.ask(*ASKS)
    with engine(models[arch], {"sites": "all"}) as running:
        mine = running.ask(*ASKS)
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other, 1e-5, arch)


def test_an_engine_that_is_switched_off_refuses_the_key(vanilla: Engine):
    before = vanilla.ask(ASKS[0])[0]
    with pytest.raises(eyesplice.SpecError, match="not switched on"):
        vanilla.ask(Ask(prompt(4), extra={"eyesplice": asking(write("v0", [0]))}))
    assert_same(vanilla.ask(ASKS[0])[0], before, 1e-5)


def test_an_engine_that_is_switched_off_leaves_hotwires_key_to_hotwire(vanilla: Engine):
    before = vanilla.ask(ASKS[0])[0]
    other = Ask(ASKS[0].prompt, max_tokens=16, extra={"hotwire": {"id": "theirs"}})
    assert_same(vanilla.ask(other)[0], before, 1e-5)
