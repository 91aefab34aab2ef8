"""Hostile requests in an engine: refused at admission, or nobody else's business."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from eyesplice import SpecError
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_request
from eyesplice.integration.frontend import FrontEnd, front_end_of
from tests.engine import Answer, Ask, Engine, assert_same, engine, prompt
from tests.hostile import Names, request
from tests.tiny_models import HIDDEN_SIZE

pytestmark = pytest.mark.engine

NEIGHBOURS, HOSTILE, BATCHES = 8, 8, 30
NAMES = Names(("v0", "v1"), ("u", "v"))


@pytest.fixture(scope="module")
def running(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hostile-vectors")
    _save(folder)
    config = {"vectors": str(folder), "ops": "all"}
    options = {"max_num_batched_tokens": 64, "max_model_len": 64}
    with engine(models["llama"], config, **options) as made:
        yield made


def _save(folder: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    for name in (*NAMES.vectors, *NAMES.rows):
        shape = (HIDDEN_SIZE,) if name in NAMES.vectors else (2, HIDDEN_SIZE)
        tensor = 0.2 * torch.randn(*shape, generator=generator)
        save_file({"tensor": tensor}, folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def plain(running: Engine) -> list[Answer]:
    return running.ask(*_neighbours())


def _neighbours() -> list[Ask]:
    return [Ask(prompt(4 + n, 70 + n), None, 4) for n in range(NEIGHBOURS)]


def _front(running: Engine) -> FrontEnd:
    found = front_end_of(running.llm.llm_engine.input_processor)
    assert found is not None
    return found


def _gets_past(extra: Any, front: FrontEnd) -> bool:
    """Whether it is accepted and asks for something."""
    try:
        found = parse_request(extra, front.context())
        if found is None or not found.functions:
            return False
        lower(found, front.context())
    except SpecError:
        return False
    return True


def _vllm_refuses(extra: Any) -> bool:
    """Whether vLLM itself refuses the parameters: integers beyond 64 bits."""
    try:
        SamplingParams(extra_args=extra)
    except VLLMValidationError:
        return True
    return False


def _ask(number: int, extra: Any) -> Ask:
    return Ask(prompt(3 + number % 9, number), None, 1 + number % 4, extra=extra)


def _assert_unmoved(answers: list[Answer], plain: list[Answer], label: str) -> None:
    for answer, expected in zip(answers, plain, strict=True):
        assert_same(answer, expected, 1e-5, label)
        assert answer.eyesplice is None, label


def test_what_gets_past_moves_no_neighbour(running: Engine, plain: list[Answer]):
    front = _front(running)
    made = ((n, request(n, NAMES)) for n in itertools.count())
    passing = ((n, extra) for n, extra in made if _gets_past(extra, front))
    for _ in range(BATCHES):
        batch = list(itertools.islice(passing, HOSTILE))
        hostile = [_ask(*one) for one in batch]
        # One and one, so that their tokens lie among each other in every step.
        mixed = itertools.chain(*zip(_neighbours(), hostile, strict=True))
        answers = running.ask(*mixed)
        label = str([number for number, _ in batch])
        _assert_unmoved(answers[::2], plain, label)
        assert all(answer.eyesplice is not None for answer in answers[1::2]), label
    assert running.router.live_programs <= HOSTILE
    _assert_unmoved(running.ask(*_neighbours()), plain, "afterwards")
    assert running.router.live_programs == 0


def test_what_is_refused_is_refused_at_admission(running: Engine, plain: list[Answer]):
    front = _front(running)
    refused = 0
    for number in range(10_000, 10_300):
        extra = request(number, NAMES)
        if _gets_past(extra, front) or _vllm_refuses(extra):
            continue
        try:
            running.ask(_neighbours()[0], _ask(number, extra))
        except SpecError:
            refused += 1
        # What asks for nothing is served.
        assert running.llm.llm_engine.get_num_unfinished_requests() == 0, number
    assert refused > 200
    _assert_unmoved(running.ask(*_neighbours()), plain, "afterwards")
