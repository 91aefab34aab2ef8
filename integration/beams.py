"""Beam search is refused to requests that have functions.

vLLM runs it as many requests of one token each: it drops the parameters that carry ours,
and what an earlier one has generated is the prompt of the next, so that conditions,
gates and receipts would all mean something else.
"""

from collections.abc import Callable
from typing import Any

from eyesplice._errors import SpecError
from eyesplice.fx_passes.request import OFF
from eyesplice.integration import ledger
from eyesplice.integration.config import KEY
from eyesplice.integration.frontend import KEYS, front_end_of
from eyesplice.integration.refusal import served


def attach() -> None:
    """Wrap the ways into beam search in this process; safe to call again."""
    from eyesplice.integration.plugin import wrap

    wrap(ledger.BEAMS_OFFLINE, _offline)


def attach_to_server() -> None:
    """The same for those of the server."""
    from eyesplice.integration.plugin import wrap

    wrap(ledger.BEAMS_ONLINE, _online)
    wrap(ledger.CHAT_BEAMS, _parameters)
    wrap(ledger.COMPLETION_BEAMS, _parameters)


def _parameters(
    original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
) -> Any:
    named = request.vllm_xargs or {}
    for key in KEYS:
        if key in named and (key, named[key]) != (KEY, OFF):
            raise served(
                SpecError(
                    f"use_beam_search with {key}",
                    named[key],
                    "beam search for requests that name no functions",
                    "sample instead, or leave the key out",
                )
            )
    return original(request, *args, **kwargs)


def _online(
    original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any
) -> Any:
    _refuse_defaults(serving.engine_client.input_processor)
    return original(serving, *args, **kwargs)


def _offline(original: Callable[..., Any], llm: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_defaults(llm.llm_engine.input_processor)
    return original(llm, *args, **kwargs)


def _refuse_defaults(processor: Any) -> None:
    front = front_end_of(processor)
    if front is not None and front.defaults:
        raise served(
            SpecError(
                f"beam search with {KEY}",
                f"default apps: {', '.join(front.defaults)}",
                "beam search where requests that name nothing get no app",
                "sample instead, or disable these apps",
            )
        )
