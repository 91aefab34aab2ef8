"""Requests of one batch do not touch each other, whatever each asks for."""

import random

import pytest

from tests.engine import (
    Answer,
    Ask,
    Engine,
    asking,
    assert_same,
    distance,
    engine,
    prompt,
    write,
)

pytestmark = pytest.mark.engine

PROGRAMS = [
    asking(write("v0", [1], scale=2.0)),
    asking(write("v0", [1], scale=-2.0)),
    asking(write("v1", [0, 3], "mlp.post", scale=0.7, when="generated")),
    asking(write("v2", "all", write="ablate")),
    asking(write("v3", [2], "attention.post", write="clamp", lo=-0.5, hi=0.5)),
    asking(write("v4", [2], "mlp.pre", scale=1.2, when="last_token")),
    asking(
        write("v5", [0], write="one_sided", offset=-0.5),
        write("v6", [0], scale=0.8),
        write("v6", [3], "attention.pre", scale=1.1, when="prompt"),
    ),
    asking(write("layered", [1, 2], "residual.mid", scale=1.5)),
]
"""Eight programs of different vectors, layers, scales, kernels and conditions."""

STEERED = [
    Ask(prompt(6 + number, number), spec, max_tokens=6 + number)
    for number, spec in enumerate([*PROGRAMS, *PROGRAMS[2:4]])
]
PLAIN = [Ask(prompt(5 + 4 * n, 20 + n), max_tokens=14 - 2 * n) for n in range(6)]


@pytest.fixture(scope="module")
def steered_alone(llama: Engine) -> list[Answer]:
    return llama.alone(*STEERED)


@pytest.fixture(scope="module")
def plain_alone(vanilla: Engine) -> list[Answer]:
    return vanilla.alone(*PLAIN)


def test_alone_each_program_has_an_effect_of_its_own(
    llama: Engine, steered_alone: list[Answer]
):
    same_prompt = [Ask(STEERED[0].prompt, spec) for spec in (None, *PROGRAMS)]
    answers = llama.alone(*same_prompt)
    for number, one in enumerate(answers):
        for other in answers[:number]:
            assert distance(one, other) > 1e-2


@pytest.mark.parametrize("seed", [0, 1])
def test_each_of_sixteen_answers_as_if_alone(
    seed: int, llama: Engine, steered_alone: list[Answer], plain_alone: list[Answer]
):
    expected = list(
        zip([*STEERED, *PLAIN], [*steered_alone, *plain_alone], strict=True)
    )
    random.Random(seed).shuffle(expected)
    with llama.steps() as steps:
        answers = llama.ask(*(ask for ask, _ in expected))
    assert max(len(step.num_scheduled_tokens) for step in steps) == 16
    for number, (answer, (ask, solo)) in enumerate(zip(answers, expected, strict=True)):
        assert_same(answer, solo, label=f"request {number}: {ask.spec}")
    _assert_nothing_is_left(llama)


def test_more_programs_than_rows_come_and_go(models, vectors, llama: Engine):
    asks = [
        Ask(
            prompt(7, 40 + number),
            asking(
                write(
                    f"v{number % 8}",
                    [number % 4],
                    scale=1.0 + number / 8,
                    when="generated" if number % 2 else "all",
                )
            ),
            max_tokens=3 + number % 4,
        )
        for number in range(12)
    ]
    expected = llama.alone(*asks)
    config = {"vectors": str(vectors.folder)}
    with engine(models["llama"], config, max_num_seqs=4) as small:
        for repetition in range(2):
            for answer, solo in zip(small.ask(*asks), expected, strict=True):
                assert_same(answer, solo, label=f"repetition {repetition}")
        _assert_nothing_is_left(small)


def _assert_nothing_is_left(running: Engine) -> None:
    # The worker hears of the last request's end with the next step.
    running.ask(Ask(prompt(3), max_tokens=2))
    assert running.router.live_programs == running.router.active_requests == 0
