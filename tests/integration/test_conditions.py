"""`when` selects the tokens it says, prompt and generated, as the oracle's masks do."""

import pytest
from torch import Tensor

from tests import oracle as judge
from tests.engine import Ask, Engine, asking, assert_judged, distance, prompt, write

pytestmark = pytest.mark.engine

PROMPT = prompt(9)


def _not(mask: judge.Mask) -> judge.Mask:
    return lambda at, n: ~mask(at, n)


def _both(a: judge.Mask, b: judge.Mask) -> judge.Mask:
    return lambda at, n: a(at, n) & b(at, n)


def _either(a: judge.Mask, b: judge.Mask) -> judge.Mask:
    return lambda at, n: a(at, n) | b(at, n)


def _until(stop: int) -> judge.Mask:
    return lambda at, n: at < n + stop


def _since(start: int) -> judge.Mask:
    return lambda at, n: at >= n + start


MASKS: dict[str, judge.Mask] = {
    "all": judge.all_tokens,
    "prompt": judge.prompt,
    "generated": judge.generated,
    "last_token": judge.last_token,
    "positions(2:5)": judge.positions(2, 5),
    "positions(-3:)": _since(-3),
    "positions(:-2)": _until(-2),
    "prompt and not last_token": _both(judge.prompt, _not(judge.last_token)),
    "positions(0:2) or generated": _either(judge.positions(0, 2), judge.generated),
    "not (positions(1:3) or positions(-1:))": _not(
        _either(judge.positions(1, 3), _since(-1))
    ),
}


def _ask(when: str) -> Ask:
    return Ask(PROMPT, asking(write("v0", [1], scale=1.5, when=when)))


@pytest.fixture(scope="module")
def answers(llama: Engine):
    asks = [Ask(PROMPT), *map(_ask, MASKS)]
    return dict(zip([None, *MASKS], llama.ask(*asks), strict=True))


@pytest.mark.parametrize("when", MASKS)
def test_a_condition_selects_what_the_oracles_mask_selects(
    when: str, answers, vectors, llama_oracle
):
    edit = judge.where(judge.add(vectors["v0"], 1.5), MASKS[when])
    where = judge.Intervention("residual.post", 1, edit)
    assert_judged(llama_oracle, answers[when], where, label=when)
    assert distance(answers[when], answers[None]) > 1e-2


def test_no_two_of_the_conditions_select_alike(answers):
    seen: list[Tensor] = []
    for when in MASKS:
        logprobs = answers[when].logprobs
        assert all((logprobs - other).abs().max() > 1e-2 for other in seen), when
        seen.append(logprobs)
