"""Whether an idle engine's greedy texts are vanilla's."""

from collections.abc import Sequence
from typing import Any, Final

from eyesplice.benchmarks.records import Refused

NEAR: Final = 0.05
"""Difference of logprobs within which a greedy choice may fall either way."""

SHARE: Final = 0.9
"""Texts that must be equal to the last token."""

Text = tuple[Sequence[int], Sequence[float]]
"""Greedy tokens and the logprob of each."""


def agreement(
    vanilla: Sequence[Text], idle: Sequence[Text], share: float = SHARE
) -> dict[str, Any]:
    """Compare texts; some may part, but only at a near tie.

    Args:
        vanilla: texts of vanilla vLLM.
        idle: of the idle engine, for the same prompts.
        share: of the texts, how many must be equal.

    Returns:
        How many texts were compared and equal, and the largest difference of a logprob
        up to the token at which a text parts.

    Raises:
        Refused: too few equal texts, or one that parts elsewhere.
    """
    equal, worst = 0, 0.0
    for (tokens, logprobs), (others, their_logprobs) in zip(vanilla, idle, strict=True):
        same = next(
            (
                i
                for i, pair in enumerate(zip(tokens, others, strict=True))
                if pair[0] != pair[1]
            ),
            len(tokens),
        )
        equal += same == len(tokens)
        pairs = list(zip(logprobs, their_logprobs, strict=True))[: same + 1]
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    if worst > NEAR or equal < share * len(vanilla):
        raise Refused(
            f"no numbers: {equal} of {len(vanilla)} idle texts equal vanilla's, and up to "
            f"where the others part logprobs are up to {worst:.3f} apart"
        )
    return {"prompts": len(vanilla), "equal": equal, "logprobs_apart": worst}
