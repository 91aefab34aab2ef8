"""Compares what two engines said: the proof that an unsteered request is untouched."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ROUNDING: Final = 0.25
"""Nats by which two correct bf16 runs of a small model may differ at a token."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Two greedy generations side by side.

    Attributes:
        equal_tokens: tokens that agree, from the first on.
        num_tokens: tokens of the longer generation.
        max_difference: largest |difference| of the chosen tokens' log-probabilities
            over the tokens that agree, in nats; infinite if one is not a number.
        parting: |difference| of the log-probabilities of the first tokens that do not
            agree, each its own engine's choice; 0 if all agree, infinite if one engine
            stopped there.
    """

    equal_tokens: int
    num_tokens: int
    max_difference: float
    parting: float = 0.0

    @property
    def same(self) -> bool:
        """Whether both engines chose the same tokens, and at least one."""
        return self.equal_tokens == self.num_tokens > 0

    @property
    def same_up_to_rounding(self) -> bool:
        """Whether the texts part at a near tie, after tokens that differ by rounding.

        Greedy decoding in bf16 turns a last-bit difference of one row into another
        text. What both engines say of every token up to there must still agree.
        """
        return self.same or max(self.max_difference, self.parting) <= ROUNDING


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
    longer = max(len(ours["tokens"]), len(theirs["tokens"]))
    parting = 0.0
    if equal < longer:
        parting = math.inf
    if equal < len(pairs):
        parting = abs(ours["logprobs"][equal] - theirs["logprobs"][equal])
    worst = max((math.inf if math.isnan(d) else d for d in differences), default=0.0)
    return Proof(equal, longer, worst, parting)
