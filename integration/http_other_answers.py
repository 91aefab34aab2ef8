"""Puts answers into what the server's other routes send.

/v1/chat/completions/batch   {"choices": [...]}, in the order of the conversations
/v1/messages                 the field `eyesplice`; in a stream, of `message_delta`
/v1/responses                the field `eyesplice`, in a stream that of the response in
                             its last event; {"turns": [...]} where tools made it several
"""

import json
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, Final

from eyesplice.integration import ledger
from eyesplice.integration.answer_body import first_answer, joined
from eyesplice.integration.config import KEY
from eyesplice.integration.http_answers import (
    DATA,
    END,
    answer_of,
    watched_into,
    with_field,
)

_DELTA: Final = "event: message_delta\n" + DATA
_TURNS: Final = "_eyesplice_turns"


def attach() -> None:
    """Wrap the server's functions in this process; safe to call again."""
    from eyesplice.integration.plugin import wrap

    wrap(ledger.CHAT_BATCH, _chat_batch)
    wrap(ledger.MESSAGES_FULL, _messages_full)
    wrap(ledger.MESSAGES_STREAM, _messages_stream)
    wrap(ledger.RESPONSES_TURNS, _responses_turns)
    wrap(ledger.RESPONSES_FULL, _responses_full)


async def _chat_batch(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    generators: list[AsyncIterator[Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    last: dict[int, Any] = {}
    watching = [watched_into(last, *one) for one in enumerate(generators)]
    response = await original(self, request, watching, *args, **kwargs)
    return with_field(response, [last[place] for place in sorted(last)])


def _messages_full(original: Callable[..., Any], self: Any, chat: Any) -> Any:
    response = original(self, chat)
    answer = answer_of(chat)
    if answer is None:
        return response
    kind: Any = type(response)
    return _open(kind).model_validate({**response.model_dump(), KEY: answer})


@cache
def _open(response: Any) -> Any:
    """The class of a response, which keeps unknown fields."""
    return type("Response", (response,), {"model_config": {"extra": "allow"}})


async def _messages_stream(
    original: Callable[..., Any], self: Any, chunks: AsyncIterator[str]
) -> AsyncIterator[str]:
    answer: dict[str, Any] | None = None

    async def watched() -> AsyncIterator[str]:
        nonlocal answer
        async for chunk in chunks:
            # Most have none, and a client's text cannot hold the key unescaped.
            if chunk.startswith(DATA + "{") and f'"{KEY}":' in chunk:
                body = json.loads(chunk.removeprefix(DATA))
                answer = joined(answer, body.get(KEY))
            yield chunk

    async for event in original(self, watched()):
        if answer is None or not event.startswith(_DELTA):
            yield event
            continue
        body = json.loads(event.removeprefix(_DELTA))
        body[KEY], answer = answer, None
        yield _DELTA + json.dumps(body, ensure_ascii=False) + END


def _responses_turns(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    given = (*args, *kwargs.values())
    context = next(part for part in given if hasattr(part, "append_output"))
    turns: dict[str, Any] = {}
    append = context.append_output

    def append_output(output: Any) -> None:
        answer = first_answer(output.outputs, KEY)
        if answer is not None:
            turns[output.request_id] = joined(turns.get(output.request_id), answer)
        append(output)

    context.append_output = append_output
    setattr(context, _TURNS, turns)
    return original(self, *args, **kwargs)


async def _responses_full(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    sampling_params: Any,
    outputs: Any,
    context: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    response = await original(
        self, request, sampling_params, outputs, context, *args, **kwargs
    )
    turns = list(getattr(context, _TURNS, {}).values())
    if turns and hasattr(response, "output"):
        setattr(response, KEY, turns[0] if len(turns) == 1 else {"turns": turns})
    return response
