"""What two servers must show before they are timed."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from eyesplice.benchmarks.records import Refused
from eyesplice.benchmarks.servers import Server

_PROMPTS: Final = 6
_PROMPT_TOKENS: Final = 40
_TOKENS: Final = 32
_NEAR: Final = 0.05
"""Logprobs at which two greedy texts may part: a near tie, decided by rounding."""

_IDS: Final = range(10, 500)


def check(
    servers: Mapping[str, Server],
    model: str,
    rows: Mapping[str, Any],
    vocab: int,
) -> dict[str, Any]:
    """Compare idle with vanilla, and see every row's apps answer.

    Args:
        servers: "vanilla" and "idle".
        model: the name that both serve it by.
        rows: what each row adds to the body of its requests.
        vocab: token ids are below it.

    Returns:
        Prompts that were equal, those that parted at a near tie, and by row the tokens
        on which its apps wrote and the scores that they gave, greedy and, where that
        was not enough, sampled.

    Raises:
        Refused: another text than vanilla's, or an app that did not act.
    """
    rng = random.Random(1)
    ids = range(min(_IDS.start, vocab - 1), min(_IDS.stop, vocab))
    prompts = [
        [rng.choice(ids) for _ in range(_PROMPT_TOKENS)] for _ in range(_PROMPTS)
    ]
    asked = {"model": model, "max_tokens": _TOKENS, "ignore_eos": True}
    asked |= {"logprobs": 1, "return_token_ids": True}
    answers = {
        name: [server.complete(**asked, prompt=prompt) for prompt in prompts]
        for name, server in servers.items()
    }
    parted = parted_at_ties(answers["vanilla"], answers["idle"])
    idle = servers["idle"]
    acted: dict[str, dict[str, Any]] = {}
    for row, body in rows.items():
        if body is None:
            continue
        # Greedy texts of random weights may never hold a token that an app waits for.
        for temperature in (0, 1):
            asked |= {"temperature": temperature, "seed": 0}
            found = [
                idle.complete(**asked, **body, prompt=prompt) for prompt in prompts
            ]
            counts = acts(row, body, [answer.get("eyesplice") for answer in found])
            acted.setdefault(row, {})["sampled" if temperature else "greedy"] = counts
            if not (resting := rests(counts)):
                break
        else:
            raise Refused(f"no numbers: in the row {row}, {resting} did not act")
    equal = len(prompts) - parted
    return {"prompts": len(prompts), "equal": equal, "parted": parted, "acted": acted}


def parted_at_ties(
    vanilla: Sequence[Mapping[str, Any]], idle: Sequence[Mapping[str, Any]]
) -> int:
    """How many of the answers part, each at a near tie.

    Raises:
        Refused: one that parts elsewhere, or whose logprobs differ before.
    """
    count = 0
    for number, (a, b) in enumerate(zip(vanilla, idle, strict=True)):
        first, second = (
            (c["token_ids"], c["logprobs"]["token_logprobs"])
            for c in (a["choices"][0], b["choices"][0])
        )
        same = next(
            (
                i
                for i, pair in enumerate(zip(first[0], second[0], strict=True))
                if pair[0] != pair[1]
            ),
            len(first[0]),
        )
        pairs = list(zip(first[1], second[1], strict=True))[: same + 1]
        worst = max(abs(x - y) for x, y in pairs)
        if worst > _NEAR:
            raise Refused(
                f"no numbers: idle differs from vanilla on prompt {number}: {same} of "
                f"{len(first[0])} tokens are equal, logprobs are {worst:.3f} apart"
            )
        count += same < len(first[0])
    return count


def acts(
    row: str, body: Mapping[str, Any], answers: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Tokens that a row's apps wrote on, and the scores that they gave.

    Raises:
        Refused: an app of the row is missing in an answer, or ran without effect.
    """
    text = body["vllm_xargs"]["eyesplice"]
    named = set(json.loads(text)["apps"]) if text.startswith("{") else {text}
    tokens: dict[str, int] = dict.fromkeys(sorted(named), 0)
    scores = dict(tokens)
    for answer in answers:
        if answer is None or set(answer.get("apps", ())) != named:
            raise Refused(f"no numbers: the row {row} was answered by {answer}")
        if error := answer.get("error"):
            raise Refused(f"no numbers: the row {row} ran without effect: {error}")
        for write in answer.get("writes", ()):
            tokens[_app(write["function"])] += write.get("tokens") or 0
        for name, score in answer.get("scores", {}).items():
            scores[_app(name)] += len(score["values"])
    return {"tokens": tokens, "scores": scores}


def rests(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The apps that neither wrote nor scored, separated by commas."""
    tokens, scores = counts["tokens"], counts["scores"]
    return ", ".join(app for app in tokens if not tokens[app] + scores[app])


def _app(function: str) -> str:
    return function.partition("/")[0]
