"""Admits requests in the front end: validates, normalises, salts the prefix cache."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.tensors import digests
from eyesplice.integration import answers
from eyesplice.integration.config import KEY
from eyesplice.integration.default_apps import AppSwitches
from eyesplice.integration.deployment import Deployment
from eyesplice.integration.known_requests import KnownRequests, Lowered, asked_for
from eyesplice.integration.refusal import served
from eyesplice.integration.router import prompt_length

KEYS: Final = (KEY, "hotwire")
_FRONT: Final = "_eyesplice_front"
_SALT: Final = f"|{KEY}:"


@dataclass(frozen=True, slots=True)
class Admission:
    """What becomes of one request.

    Attributes:
        extra_args: for the worker: the caller's, with our part normalised.
        lowered: what it asks for, None when that is nothing.
        error: why it is served without effect.
    """

    extra_args: dict[str, Any]
    lowered: Lowered | None = None
    error: str | None = None


class FrontEnd:
    """The part of one engine that meets requests."""

    def __init__(self, vllm_config: Any) -> None:
        self._deployment = Deployment.of(vllm_config)
        found = self._deployment
        self._switches = AppSwitches(
            found.apps.names if found else (),
            found.config.default_apps if found else (),
        )
        self._made: tuple[frozenset[str], Context] | None = None
        self._known = KnownRequests()

    @property
    def switched_on(self) -> bool:
        """Whether the engine runs with eyesplice."""
        return self._deployment is not None

    @property
    def deployment(self) -> Deployment:
        """What the engine deploys.

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
        return self._deployment

    @property
    def defaults(self) -> tuple[str, ...]:
        """The apps that a request gets now if it names none."""
        return self._switches.defaults

    def is_enabled(self, name: str) -> bool:
        """Whether new requests can have the app."""
        return name not in self._switches.disabled

    def enable(self, name: str) -> None:
        """Let new requests have the app.

        Raises:
            SpecError: no such app.
        """
        self._switches.enable(name)

    def disable(self, name: str) -> None:
        """Keep the app from new requests; those that run keep it.

        Raises:
            SpecError: no such app.
        """
        self._switches.disable(name)

    def context(self) -> Context:
        """What requests can name now.

        Raises:
            SpecError: eyesplice is not switched on in this engine.
        """
        disabled, made = self._switches.disabled, self._made
        if made is None or made[0] != disabled:
            deployment = self.deployment
            context = deployment.context(deployment.read_report(), disabled)
            self._made = made = disabled, context
        return made[1]

    def concerns(self, params: Any) -> bool:
        """Whether a request with these parameters is anything to eyesplice.

        hotwire's key is not ours, unless eyesplice is switched on.
        """
        keys = KEYS if self.switched_on else (KEY,)
        extra_args = getattr(params, "extra_args", None)
        if extra_args and any(key in extra_args for key in keys):
            return True
        return bool(self._switches.defaults) and hasattr(params, "max_tokens")

    def admit(self, extra_args: Mapping[str, Any]) -> Admission:
        """Validate what a request asks for.

        Raises:
            SpecError: the request cannot be served as written, and may not be served
                otherwise.
        """
        rest = {key: value for key, value in extra_args.items() if key not in KEYS}
        deployment = self.deployment
        try:
            return self._admit(extra_args, rest)
        except SpecError as error:
            if deployment.config.on_error != "unsteered":
                raise
            return Admission(rest, error=str(error))

    def _admit(self, extra_args: Mapping[str, Any], rest: dict[str, Any]) -> Admission:
        context = self.context()
        lowered = self._lowered(extra_args, context)
        if lowered is None:
            return Admission(rest)
        return Admission({**rest, KEY: lowered.text}, lowered)

    def _lowered(
        self, extra_args: Mapping[str, Any], context: Context
    ) -> Lowered | None:
        """What the request asks for; None for nothing."""
        asked = asked_for(tuple(extra_args.get(key) for key in KEYS))
        if asked is not None and (known := self._known.get(asked, context)):
            return known
        request = parse_request(extra_args, context)
        if request is None or not request.functions:
            return None
        # Lowering finds what parsing cannot: too many entries, scores or conditions.
        program = lower(request, context)
        own = (f.tensors for f in request.functions if f.app is None)
        found = Lowered(
            request.canonical(),
            request,
            program,
            program.changes_kv,
            digests(context.vectors, {name for names in own for name in names}),
        )
        if asked is not None:
            self._known.keep(asked, context, found)
        return found


def cache_salt(program: Program, num_prompt_tokens: int) -> str:
    """What tells the prefix-cache blocks of a program from all others.

    Under a condition that counts from the prompt's end, a token is treated alike in
    prompts of one length only: what one request generated may be another's prompt.
    """
    if program.depends_on_prompt_length:
        return f"{_SALT}{program.digest}:{num_prompt_tokens}"
    return f"{_SALT}{program.digest}"


def open_front_end(processor: Any) -> None:
    """Read what the engine deploys, once, when its front end is made.

    Raises:
        SpecError: vectors or apps that cannot be registered.
    """
    front = FrontEnd(processor.vllm_config)
    setattr(processor, _FRONT, front)
    if front.switched_on:
        from eyesplice.integration import beams, http_routes

        beams.attach()
        http_routes.attach()


def front_end_of(processor: Any) -> FrontEnd | None:
    """The front end that was opened for one of vLLM's input processors."""
    return getattr(processor, _FRONT, None)


def process_inputs(
    original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's `InputProcessor.process_inputs`, with eyesplice's part of the request.

    Raises:
        SpecError: the request cannot be served as written.
    """
    params = kwargs["params"] if "params" in kwargs else args[2]
    front: FrontEnd = getattr(processor, _FRONT)
    admission = None
    if front.concerns(params):
        try:
            admission = front.admit(params.extra_args or {})
        except SpecError as error:
            raise served(error) from None
        # The processor copies deeply what it gets: our text is much faster to copy than
        # what the client wrote, whose own parameters stay as they are.
        params = copy(params)
        params.extra_args = admission.extra_args or None
        if "params" in kwargs:
            kwargs["params"] = params
        else:
            args = (*args[:2], params, *args[3:])
    result = original(processor, *args, **kwargs)
    if front.switched_on:
        _refuse_forged_salt(result)
    if admission is not None:
        _mark(result, admission)
    return result


def _refuse_forged_salt(result: Any) -> None:
    """Refuse a client's salt that could be a program's: it would share its blocks."""
    salt = result.cache_salt
    if salt and _SALT in salt:
        raise served(
            SpecError("cache_salt", salt, f"text without {_SALT!r}", "choose another")
        )


def _mark(result: Any, admission: Admission) -> None:
    """Give an engine core request what was admitted."""
    lowered = admission.lowered
    if lowered is None:
        if admission.error is not None:
            answers.remember(result.request_id, None, None, error=admission.error)
        return
    program = lowered.program
    if lowered.changes_kv:
        salt = cache_salt(program, prompt_length(result))
        result.cache_salt = f"{result.cache_salt or ''}{salt}"
    if program.needs_every_token:
        result.sampling_params.skip_reading_prefix_cache = True
    answers.remember(
        result.request_id,
        program,
        lowered.request,
        vectors=lowered.vectors,
        text=lowered.text,
    )
