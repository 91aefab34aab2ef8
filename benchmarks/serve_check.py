"""What two servers must show before they are timed."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from eyesplice.benchmarks.agreement import Text, agreement
from eyesplice.benchmarks.records import Refused
from eyesplice.benchmarks.servers import Server

_PROMPTS: Final = 6
_PROMPT_TOKENS: Final = 40
_TOKENS: Final = 32
_SHARE: Final = 0.5
"""A few texts say little about how many part."""

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
        How many texts were equal, see `agreement`, and by row the tokens
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
    expected, same = (
        [_text(servers[name].complete(**asked, prompt=prompt)) for prompt in prompts]
        for name in ("vanilla", "idle")
    )
    agreed = agreement(expected, same, share=_SHARE)
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
    return {**agreed, "acted": acted}


def _text(answer: Mapping[str, Any]) -> Text:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


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
