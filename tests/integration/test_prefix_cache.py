"""Keys and values of a steered prompt are shared only by requests that steer alike."""

import pytest

from tests import oracle as judge
from tests.engine import (
    Ask,
    Engine,
    asking,
    assert_judged,
    assert_same,
    distance,
    prompt,
    write,
)
from tests.integration.conftest import Vectors

pytestmark = pytest.mark.engine

# More than three blocks of 32 tokens, of which a request can find three.
PROMPT = prompt(100, 70)
CACHED = 96


def _ask(spec: object = None, tokens: list[int] = PROMPT) -> Ask:
    return Ask(tokens, spec, prompt_logprobs=False)


def _steered(scale: float, vector: str = "v0") -> dict[str, object]:
    return asking(write(vector, [1], scale=scale))


def test_steered_and_plain_requests_keep_caches_of_their_own(
    llama: Engine, vanilla: Engine
):
    asks = [_ask(_steered(2.0)), _ask(), _ask(_steered(2.0)), _ask()]
    steered, plain, steered_again, plain_again = llama.alone(*asks)
    expected = vanilla.ask(_ask())[0]
    assert_same(plain, expected)
    assert_same(plain_again, expected)
    assert_same(steered_again, steered)
    assert distance(steered, plain) > 1e-2
    assert (steered.cached, plain.cached) == (0, 0)
    assert (steered_again.cached, plain_again.cached) == (CACHED, CACHED)


def test_another_program_is_another_cache(llama: Engine):
    tokens = prompt(100, 71)
    first, scale, vector, layer = llama.alone(
        _ask(_steered(2.0), tokens),
        _ask(_steered(2.5), tokens),
        _ask(_steered(2.0, "v1"), tokens),
        _ask(asking(write("v0", [2], scale=2.0)), tokens),
    )
    assert [a.cached for a in (first, scale, vector, layer)] == [0, 0, 0, 0]
    for one, other in ((first, scale), (first, vector), (first, layer)):
        assert distance(one, other) > 1e-2


def test_the_same_program_in_other_words_shares_the_cache(llama: Engine):
    tokens = prompt(100, 72)
    words = asking(
        {"vector": "v0", "submodule": "blocks.1.hook_resid_post", "scale": 2}
    )
    first, again = llama.alone(_ask(_steered(2.0), tokens), _ask(words, tokens))
    assert (first.cached, again.cached) == (0, CACHED)
    assert_same(again, first)


def test_a_batch_of_one_prompt_does_not_mix_its_programs(
    llama: Engine, vanilla: Engine
):
    tokens = prompt(100, 73)
    specs = [_steered(2.0), None, _steered(-2.0), None, _steered(2.0)]
    one, plain, other, plain_too, one_too = llama.ask(
        *(_ask(spec, tokens) for spec in specs)
    )
    expected = vanilla.ask(_ask(None, tokens))[0]
    assert_same(plain, expected)
    assert_same(plain_too, expected)
    assert_same(one, one_too)
    assert distance(one, other) > 1e-2


@pytest.mark.parametrize(
    ("when", "shared"),
    [("all", True), ("generated", False), ("prompt", False), ("positions(-9:)", False)],
)
def test_what_was_generated_is_prompt_in_the_next_turn(
    llama: Engine, llama_oracle, vectors: Vectors, when: str, shared: bool
):
    spec = asking(write("v0", [1], scale=2.0, when=when))
    turn = prompt(70, 90 + len(when))
    first = llama.ask(Ask(turn, spec, max_tokens=60, prompt_logprobs=False))[0]
    # 130 tokens: four blocks of 32 that the first turn has computed.
    longer = [*turn, *first.tokens]
    second = llama.ask(Ask(longer, spec, prompt_logprobs=False))[0]
    assert (second.cached > 0) == shared
    masks = {
        "all": judge.all_tokens,
        "generated": judge.generated,
        "prompt": judge.prompt,
        "positions(-9:)": lambda at, n: at >= n - 9,
    }
    edit = judge.where(judge.add(vectors["v0"], 2.0), masks[when])
    assert_judged(llama_oracle, second, judge.Intervention("residual.post", 1, edit))
