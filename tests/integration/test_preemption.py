"""A preempted request is computed anew, and steered as if nothing had happened."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine import (
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

TIGHT = {"max_model_len": 128, "num_gpu_blocks_override": 9, "max_num_seqs": 8}
"""Room for two full requests: eight blocks of 32 tokens, and vLLM's own one."""

CONDITIONS = ["generated", "prompt", "generated", None, "prompt and not last_token"]
ASKS = [
    Ask(
        prompt(28 + number, 60 + number),
        when and asking(write(f"v{number}", [1], scale=1.0 + number / 4, when=when)),
        max_tokens=50,
        prompt_logprobs=False,
    )
    for number, when in enumerate(CONDITIONS)
]


READS = [
    {
        "read": "probe",
        "name": "p",
        "weight": "v5",
        "layers": [2],
        "submodule": "residual.post",
    },
    {"read": "capture", "layers": [1], "submodule": "residual.mid"},
]
COUNTED = {"all": 28 + 49, "generated": 49, "prompt": 28, None: 28 + 49}
"""Tokens on which a write under each condition acts; None reads as well.

The last one of 50 generated tokens is never computed with.
"""


@contextmanager
def _preemptions(running: Engine) -> Iterator[list[Any]]:
    """Collects the requests that lose their place inside the block."""
    seen: list[Any] = []
    scheduler, original = running.scheduler, running.scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        seen.append(request)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    try:
        yield seen
    finally:
        del scheduler._preempt_request


def test_preempted_requests_answer_as_if_alone(models, vectors, llama: Engine):
    expected = llama.alone(*ASKS)
    config = {"vectors": str(vectors.folder)}
    with (
        engine(models["llama"], config, **TIGHT) as tight,
        _preemptions(tight) as preempted,
    ):
        answers = tight.ask(*ASKS)
        tight.ask(Ask(prompt(3), max_tokens=2))
        assert tight.router.live_programs == 0
    assert len({request.request_id for request in preempted}) >= 2, (
        "the cache was large enough for everyone"
    )
    for answer, alone, when in zip(answers, expected, CONDITIONS, strict=True):
        assert_same(answer, alone, label=str(when))
    bare = llama.alone(*(Ask(a.prompt, prompt_logprobs=False) for a in ASKS))
    for answer, other, when in zip(answers, bare, CONDITIONS, strict=True):
        assert when is None or distance(answer, other) > 1e-2, when


def _resumed(steps: list[Any]) -> dict[str, int]:
    """The first position that each resumed request computed, where it did so last."""
    found = {}
    for step in steps:
        cached = step.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            place = cached.req_ids.index(request_id)
            found[request_id] = cached.num_computed_tokens[place]
    return found


@pytest.fixture(scope="module")
def caching(models, vectors) -> Iterator[Engine]:
    config = {"vectors": str(vectors.folder)}
    with engine(
        models["llama"], config, enable_prefix_caching=True, **TIGHT
    ) as running:
        yield running


def _asks(when: str | None) -> list[Ask]:
    spec = asking(write("v1", [1, 2], when=when or "all"))
    if when is None:
        spec["reads"] = READS
    return [
        Ask(prompt(28, 80 + number), spec, max_tokens=50, prompt_logprobs=False)
        for number in range(3)
    ]


PLAIN = Ask(prompt(28, 90), max_tokens=50, prompt_logprobs=False)


@pytest.mark.parametrize("when", COUNTED)
def test_a_prefix_cache_takes_nothing_from_preempted_requests(caching: Engine, when):
    asks = _asks(when)
    assert caching.scheduler.reset_prefix_cache()
    expected = caching.alone(*asks)
    assert caching.scheduler.reset_prefix_cache()
    with _preemptions(caching) as preempted, caching.steps() as steps:
        # The last two lose their place, and the blocks of the third are kept.
        *answers, _ = caching.ask(*asks, PLAIN)
    ours = [request.request_id for request in preempted if _is_ours(request)]
    assert [_resumed(steps)[request_id] for request_id in ours] == [0]
    for answer, alone in zip(answers, expected, strict=True):
        assert_same(answer, alone)
        assert answer.eyesplice["writes"][0]["tokens"] == COUNTED[when]
        _assert_found_alike(answer.eyesplice, alone.eyesplice)


def test_a_preempted_plain_request_finds_its_blocks_as_ever(caching: Engine):
    first, second, third = _asks("all")
    assert caching.scheduler.reset_prefix_cache()
    with _preemptions(caching) as preempted, caching.steps() as steps:
        _, _, answer, _ = caching.ask(first, second, PLAIN, third)
    plain = [request.request_id for request in preempted if not _is_ours(request)]
    assert [_resumed(steps)[request_id] for request_id in plain] == [64]
    assert answer.eyesplice is None
    assert_same(answer, caching.ask(PLAIN)[0])


def _is_ours(request: Any) -> bool:
    return bool(request.sampling_params.extra_args)


def _assert_found_alike(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """The same, up to rounding: chunks of other sizes add in another order."""
    assert found.keys() == alone.keys() and "error" not in found
    assert found["writes"] == alone["writes"]
    if not found["scores"]:
        return
    score, other = found["scores"]["p"], alone["scores"]["p"]
    assert score["positions"] == other["positions"] == list(range(COUNTED[None]))
    assert score["values"] == pytest.approx(other["values"], abs=1e-4, rel=1e-4)
    capture, other = (a["captures"]["blocks.1.hook_resid_mid"] for a in (found, alone))
    assert capture["positions"] == other["positions"] == list(range(COUNTED[None]))
    rows, same = (_floats(a["data"]) for a in (capture, other))
    np.testing.assert_allclose(rows, same, atol=1e-4, rtol=1e-4)


def _floats(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data), np.float32)
