"""Requests of a benchmark: greedy, of a given length, with prompts drawn from a seed."""

import random
from typing import Any, Final

SETTLE: Final = 8
"""Tokens that each request of a full batch has before a decode step counts."""


def greedy(
    max_tokens: int, extra_args: dict[str, Any] | None, logprobs: int | None = None
) -> Any:
    """vLLM's sampling parameters of a text of exactly `max_tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        extra_args=extra_args,
    )


def drawn(rng: random.Random, tokens: int) -> dict[str, list[int]]:
    """A prompt of that many tokens, ids that every vocabulary has."""
    return {"prompt_token_ids": [rng.randrange(10, 500) for _ in range(tokens)]}


def add_batch(
    llm: Any,
    name: str,
    batch: int,
    prompt_tokens: int,
    max_tokens: int,
    extra_args: list[dict[str, Any] | None],
    seed: int,
) -> None:
    """Hand a full batch to the engine; request i runs `extra_args[i % len(extra_args)]`.

    Args:
        llm: vLLM's.
        name: keeps the ids of two batches apart.
        batch: requests.
        prompt_tokens, max_tokens: of each.
        extra_args: the programs, taken in turn.
        seed: of the prompts.
    """
    rng = random.Random(seed)
    for i in range(batch):
        params = greedy(max_tokens, extra_args[i % len(extra_args)])
        llm.llm_engine.add_request(f"{name}-{i}", drawn(rng, prompt_tokens), params)
