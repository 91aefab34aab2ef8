"""Steps that hold a prompt beside requests that decode, timed in the engine's process."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from eyesplice.benchmarks.batches import SETTLE, add_batch, drawn, greedy

STEPS: Final = 4
"""Of a cycle: one with a prompt in it, and decode steps."""

_FIRST_PROMPT: Final = 16
_AFTER: Final = 8
"""Tokens that the decoding requests have left when the last cycle ends."""


def tokens_beside(cycles: int) -> int:
    """Tokens that each request beside the prompts needs, its own prompt included."""
    return _FIRST_PROMPT + SETTLE + STEPS * cycles + _AFTER


def cycles(
    llm: Any,
    *,
    batch: int,
    prompt_tokens: int,
    cycles: int,
    extra_args: dict[str, Any] | None,
    seed: int,
    name: str,
) -> dict[str, Any]:
    """Seconds of cycles, each of a step that holds a new prompt and of decode steps.

    Args:
        llm: vLLM's.
        batch: requests that decode meanwhile.
        prompt_tokens: of each new prompt, whose request ends with its first token.
        cycles: to time.
        extra_args: what every request asks for.
        seed: of the prompts.
        name: keeps the requests of two calls apart.

    Returns:
        `seconds` of each cycle, `host_seconds` that the runner's own code took for each
        step with a prompt, `tokens` of those steps, and `acted`: the new requests whose
        answer says that each write acted.
    """
    import gc

    from eyesplice.benchmarks.engine_child import wrote

    engine = llm.llm_engine
    rng = random.Random(seed)
    tokens = tokens_beside(cycles) - _FIRST_PROMPT
    own = f"{seed}-{name}"
    add_batch(llm, own, batch, _FIRST_PROMPT, tokens, [extra_args], seed)
    reached = 0
    while reached <= SETTLE:
        found = [len(output.outputs[0].token_ids) for output in engine.step()]
        reached = min(found) if len(found) == batch else 0
    seconds: list[float] = []
    acted = 0
    gc.collect()
    gc.disable()
    with _watched(llm, batch) as steps:
        for number in range(cycles):
            prompt, params = drawn(rng, prompt_tokens), greedy(1, extra_args)
            start = time.perf_counter()
            engine.add_request(f"{own}-new-{number}", prompt, params)
            outputs = [output for _ in range(STEPS) for output in engine.step()]
            seconds.append(time.perf_counter() - start)
            acted += sum(wrote(o) for o in outputs if "-new-" in o.request_id)
    gc.enable()
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "seconds": seconds,
        "host_seconds": [took for _, took in steps],
        "tokens": [number for number, _ in steps],
        "acted": acted,
    }


@contextmanager
def _watched(llm: Any, batch: int) -> Iterator[list[tuple[int, float]]]:
    """(tokens, seconds on the host) of each step of more tokens than `batch`."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    original = runner.execute_model
    steps: list[tuple[int, float]] = []

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original(scheduled, *args, **kwargs)
        took = time.perf_counter() - start
        if scheduled.total_num_scheduled_tokens > batch:
            steps.append((scheduled.total_num_scheduled_tokens, took))
        return result

    runner.execute_model = execute_model
    try:
        yield steps
    finally:
        del runner.execute_model
