"""A prompt that is computed in chunks is steered as one that is computed at once."""

from collections import Counter

import pytest

from tests import oracle as judge
from tests.engine import (
    Answer,
    Ask,
    Engine,
    asking,
    assert_judged,
    assert_same,
    engine,
    prompt,
    write,
)

pytestmark = pytest.mark.engine

BUDGET = 32
LENGTH = 100
MASKS: dict[str, judge.Mask] = {
    "all": judge.all_tokens,
    "prompt": judge.prompt,
    "generated": judge.generated,
    "last_token": judge.last_token,
    "positions(30:70)": judge.positions(30, 70),
    "positions(-40:-3)": judge.positions(-40, -3),
}
LONG = [
    Ask(prompt(LENGTH, n), asking(write("v0", [1], scale=1.5, when=when)))
    for n, when in enumerate(MASKS)
]
MATES = [
    Ask(prompt(6, 90), max_tokens=20),
    Ask(prompt(8, 91), asking(write("v1", [2], scale=-2.0)), max_tokens=20),
]


@pytest.fixture(scope="module")
def chunked(models, vectors) -> list[Answer]:
    config = {"vectors": str(vectors.folder)}
    with (
        engine(models["llama"], config, max_num_batched_tokens=BUDGET) as running,
        running.steps() as steps,
    ):
        answers = running.ask(*MATES, *LONG)
    assert all(step.total_num_scheduled_tokens <= BUDGET for step in steps)
    chunks = Counter(
        request
        for step in steps
        for request, tokens in step.num_scheduled_tokens.items()
        if tokens > 1
    )
    assert sum(count >= 3 for count in chunks.values()) == len(LONG)
    shared = [step for step in steps if len(step.num_scheduled_tokens) > 1]
    assert len(shared) > len(steps) // 2
    return answers


def test_chunked_answers_are_those_of_one_chunk(chunked: list[Answer], llama: Engine):
    with llama.steps() as steps:
        whole = llama.alone(*MATES, *LONG)
    largest = max(step.total_num_scheduled_tokens for step in steps)
    assert largest == LENGTH
    for answer, other, ask in zip(chunked, whole, [*MATES, *LONG], strict=True):
        assert_same(answer, other, label=str(ask.spec))


def test_chunked_answers_are_the_oracles(
    chunked: list[Answer], vectors, llama_oracle: judge.Oracle
):
    for answer, (when, mask) in zip(chunked[len(MATES) :], MASKS.items(), strict=True):
        edit = judge.where(judge.add(vectors["v0"], 1.5), mask)
        where = judge.Intervention("residual.post", 1, edit)
        assert_judged(llama_oracle, answer, where, label=when)
