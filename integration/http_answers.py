"""Puts answers, `CompletionOutput.eyesplice`, into what the HTTP server sends.

vLLM's response models keep unknown fields, so a wrapper around the functions that make
responses is enough: it watches the outputs that go in, and adds the field `eyesplice`
to the response that comes out.

full answer   the object of the one choice; {"choices": [...]} for several, an object or
              null each, in the order of the choices
stream        the chunk with a choice's finish reason has its object. When the request
              asked for its scores as they come, the chunks before it have one each
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from eyesplice.integration import ledger
from eyesplice.integration.answer_body import joined
from eyesplice.integration.config import KEY

DATA: Final = "data: "
END: Final = "\n\n"


def attach() -> None:
    """Wrap the server's functions in this process; safe to call again."""
    from eyesplice.integration.plugin import wrap

    wrap(ledger.CHAT_FULL, _chat_full)
    wrap(ledger.CHAT_STREAM, _chat_stream)
    wrap(ledger.COMPLETION_FULL, _completion_full)
    wrap(ledger.COMPLETION_STREAM, _completion_stream)


async def _chat_full(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    outputs: AsyncIterator[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    last: dict[int, Any] = {}
    watched = watched_into(last, 0, outputs)
    response = await original(self, request, watched, *args, **kwargs)
    return with_field(response, last.values())


def _completion_full(
    original: Callable[..., Any], self: Any, outputs: list[Any], *args: Any, **kw: Any
) -> Any:
    return with_field(original(self, outputs, *args, **kw), outputs)


async def watched_into(
    last: dict[int, Any], place: int, outputs: AsyncIterator[Any]
) -> AsyncIterator[Any]:
    """The outputs, of which `last[place]` is the latest one that came by."""
    async for output in outputs:
        last[place] = output
        yield output


def with_field(response: Any, outputs: Iterable[Any]) -> Any:
    """A response, with the answers of the outputs that it was made of."""
    answers = [answer_of(part) for output in outputs for part in output.outputs]
    if any(answer is not None for answer in answers) and hasattr(response, "choices"):
        one = answers[0] if len(answers) == 1 else {"choices": answers}
        setattr(response, KEY, one)
    return response


def answer_of(part: Any) -> dict[str, Any] | None:
    """The answer on one of a request's completions, None for nothing."""
    answer: dict[str, Any] | None = getattr(part, KEY, None)
    return answer


async def _chat_stream(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    outputs: AsyncIterator[Any],
    *args: Any,
    **kwargs: Any,
) -> AsyncIterator[str]:
    pending = Pending()

    async def watched() -> AsyncIterator[Any]:
        async for output in outputs:
            for part in output.outputs:
                pending.see(part.index, part)
            yield output

    async for chunk in original(self, request, watched(), *args, **kwargs):
        yield pending.into(chunk)


async def _completion_stream(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    prompts: Any,
    outputs: AsyncIterator[tuple[int, Any]],
    *args: Any,
    **kwargs: Any,
) -> AsyncIterator[str]:
    pending = Pending()

    async def watched() -> AsyncIterator[tuple[int, Any]]:
        async for prompt, output in outputs:
            for part in output.outputs:
                pending.see(part.index + prompt * (request.n or 1), part)
            yield prompt, output

    async for chunk in original(self, request, prompts, watched(), *args, **kwargs):
        yield pending.into(chunk)


class Pending:
    """The answers of one stream, each on its way into the next chunk that fits."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[str, Any]] = {}
        self._ended: set[int] = set()

    def see(self, choice: int, part: Any) -> None:
        """Take the answer of a completion that goes into the stream.

        Args:
            choice: the index of its choice in the stream.
            part: the completion.
        """
        answer = joined(self._answers.get(choice), answer_of(part))
        if answer is not None:
            self._answers[choice] = answer
        if part.finish_reason:
            self._ended.add(choice)

    def into(self, chunk: str) -> str:
        """The chunk, with the answer if it is the one that the answer waits for."""
        if not self._answers or not chunk.startswith(DATA + "{"):
            return chunk
        body = json.loads(chunk.removeprefix(DATA))
        for choice in body.get("choices") or ():
            if choice["index"] in self._answers and self._fits(choice):
                body[KEY] = self._answers.pop(choice["index"])
                return DATA + json.dumps(body, ensure_ascii=False) + END
        return chunk

    def _fits(self, choice: dict[str, Any]) -> bool:
        if choice["index"] in self._ended:
            return bool(choice.get("finish_reason"))
        # A chat begins with a chunk that only names the role.
        return "role" not in (choice.get("delta") or {})
