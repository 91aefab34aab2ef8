"""Refusals as vLLM's server understands them: HTTP 400 with the message."""

from functools import cache

from eyesplice._errors import SpecError


@cache
def _served_type() -> type[SpecError]:
    """SpecError, as a client error of the installed vLLM where it has such a class.

    Up to 0.25 any ValueError of a request is answered with 400. Later versions let
    through only their own `VLLMClientError` and answer the rest with an empty 500.
    """
    from vllm import exceptions

    client_error = getattr(exceptions, "VLLMClientError", None)
    if client_error is None:
        return SpecError
    return type("RefusedRequest", (SpecError, client_error), {})


def served(error: SpecError) -> SpecError:
    """The same refusal, in the class that the front end must raise."""
    return _served_type()(error.thing, error.value, error.allowed, error.remedy)
