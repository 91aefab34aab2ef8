"""A preempted request is computed anew, and steered as if nothing had happened."""

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def _preemptions(running: Engine) -> Iterator[list[str]]:
    """Collects the ids of requests that lose their place inside the block."""
    seen: list[str] = []
    scheduler, original = running.scheduler, running.scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        seen.append(request.request_id)
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
    assert len(set(preempted)) >= 2, "the cache was large enough for everyone"
    for answer, alone, when in zip(answers, expected, CONDITIONS, strict=True):
        assert_same(answer, alone, label=str(when))
    bare = llama.alone(*(Ask(a.prompt, prompt_logprobs=False) for a in ASKS))
    for answer, other, when in zip(answers, bare, CONDITIONS, strict=True):
        assert when is None or distance(answer, other) > 1e-2, when
