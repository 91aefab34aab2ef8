"""Admits requests in the front end: validates, normalises, salts the prefix cache."""

from collections.abc import Callable
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.request import parse_request
from eyesplice.integration.config import KEY
from eyesplice.integration.deployment import Deployment
from eyesplice.integration.refusal import served
from eyesplice.integration.router import prompt_length

KEYS: Final = (KEY, "hotwire")
_FRONT: Final = "_eyesplice_front"


class FrontEnd:
    """The part of one engine that meets requests."""

    def __init__(self, vllm_config: Any) -> None:
        self._deployment = Deployment.of(vllm_config)
        self._context: Context | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a request that are ours: not hotwire's unless switched on."""
        return KEYS if self._deployment is not None else (KEY,)

    def context(self) -> Context:
        """What requests can name.

        Raises:
            SpecError: eyesplice is not switched on in this engine.
        """
        if self._deployment is None:
            raise SpecError(
                "request",
                KEY,
                "requests without that key: eyesplice is installed, not switched on",
                "start the engine with additional_config={'eyesplice': {}}",
            )
        if self._context is None:
            self._context = self._deployment.context(self._deployment.read_report())
        return self._context

    def admit(
        self, extra_args: dict[str, Any]
    ) -> tuple[dict[str, Any], Program | None]:
        """Validate what a request asks for.

        Returns:
            The arguments for the worker, normalised, and the program that the request
            becomes (None when it asks for nothing).

        Raises:
            SpecError: the request cannot be served as written.
        """
        context = self.context()
        request = parse_request(extra_args, context)
        rest = {key: value for key, value in extra_args.items() if key not in KEYS}
        if request is None or not request.writes:
            return rest, None
        # Lowering finds what parsing cannot: too many entries or conditions.
        program = lower(request, context)
        return {**rest, KEY: request.canonical()}, program


def cache_salt(program: Program, num_prompt_tokens: int) -> str:
    """What tells the prefix-cache blocks of a program from all others.

    Under a condition that counts from the prompt's end, a token is treated alike in
    prompts of one length only: what one request generated may be another's prompt.
    """
    if program.depends_on_prompt_length:
        return f"|{KEY}:{program.digest}:{num_prompt_tokens}"
    return f"|{KEY}:{program.digest}"


def open_front_end(processor: Any) -> None:
    """Read what the engine deploys, once, when its front end is made.

    Raises:
        SpecError: vectors that cannot be registered.
    """
    setattr(processor, _FRONT, FrontEnd(processor.vllm_config))


def process_inputs(
    original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's `InputProcessor.process_inputs`, with eyesplice's part of the request.

    Raises:
        SpecError: the request cannot be served as written.
    """
    params = kwargs["params"] if "params" in kwargs else args[2]
    extra_args = getattr(params, "extra_args", None)
    front: FrontEnd = getattr(processor, _FRONT)
    if not extra_args or not any(key in extra_args for key in front.keys):
        return original(processor, *args, **kwargs)
    try:
        admitted, program = front.admit(extra_args)
    except SpecError as error:
        raise served(error) from None
    result = original(processor, *args, **kwargs)
    # The processor has cloned the caller's parameters: these are the request's own.
    result.sampling_params.extra_args = admitted or None
    if program is not None:
        salt = cache_salt(program, prompt_length(result))
        result.cache_salt = f"{result.cache_salt or ''}{salt}"
    return result
