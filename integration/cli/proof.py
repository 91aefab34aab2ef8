"""Compares what two engines said: the proof that an unsteered request is untouched."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Proof:
    """Two greedy generations side by side.

    Attributes:
        equal_tokens: tokens that agree, from the first on.
        num_tokens: tokens of the longer generation.
        max_difference: largest |difference| of the chosen tokens' log-probabilities
            over the tokens that agree, in nats; infinite if one is not a number.
    """

    equal_tokens: int
    num_tokens: int
    max_difference: float

    @property
    def same(self) -> bool:
        """Whether both engines chose the same tokens, and at least one."""
        return self.equal_tokens == self.num_tokens > 0


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Proof:
    """Compare two outputs of a generate job, `tokens` and `logprobs` each."""
    pairs = list(zip(ours["tokens"], theirs["tokens"], strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    differences = [
        abs(a - b)
        for a, b in zip(
            ours["logprobs"][:equal], theirs["logprobs"][:equal], strict=True
        )
    ]
    worst = max((math.inf if math.isnan(d) else d for d in differences), default=0.0)
    return Proof(equal, max(len(ours["tokens"]), len(theirs["tokens"])), worst)
