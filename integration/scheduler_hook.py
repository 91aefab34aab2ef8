"""The engine core's part of the road back: adds results up and sends them on.

A request's results leave with the output that finishes it, under our key of
`kv_transfer_params`: the one field of an `EngineCoreOutput` that holds any object. With
every output they leave when the client wants its scores as they come, and when a stop
string may end the request: then it is the front end that finishes it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from eyesplice.integration.config import KEY
from eyesplice.integration.raw_answers import RawAnswer, StepAnswer

_STATE: Final = "_eyesplice_answers"


def update_from_output(
    original: Callable[..., Any],
    scheduler: Any,
    scheduler_output: Any,
    model_runner_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """vLLM's `Scheduler.update_from_output`, with the results in its outputs."""
    step: StepAnswer | None = getattr(model_runner_output, KEY, None)
    state: CoreAnswers | None = getattr(scheduler, _STATE, None)
    if step is not None and state is None:
        state = CoreAnswers()
        setattr(scheduler, _STATE, state)
    if state is None or (step is None and state.is_empty):
        return original(
            scheduler, scheduler_output, model_runner_output, *args, **kwargs
        )
    if step is not None:
        state.add(step, scheduler.requests)
    outputs = original(
        scheduler, scheduler_output, model_runner_output, *args, **kwargs
    )
    for of_client in outputs.values():
        for output in of_client.outputs:
            state.send(output, step)
    state.forget_gone(scheduler.requests)
    return outputs


class CoreAnswers:
    """The unsent results of one engine core's requests."""

    def __init__(self) -> None:
        self._unsent: dict[str, RawAnswer] = {}
        self._sends_always: dict[str, bool] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no request has anything to send."""
        return not (self._unsent or self._sends_always)

    def add(self, step: StepAnswer, requests: Mapping[str, Any]) -> None:
        """Add a step's results, except those of requests that have ended meanwhile.

        Args:
            step: what the worker found out.
            requests: the scheduler's unfinished requests.
        """
        for request_id in (*step.place, *step.errors):
            request = requests.get(request_id)
            if request is None or request.is_finished():
                continue
            if request_id not in self._sends_always:
                self._sends_always[request_id] = _sends_always(request)
            if request_id in step.scores or request_id in step.captures:
                answer = self._unsent.setdefault(request_id, RawAnswer())
                answer.add_rows(step, request_id)

    def send(self, output: Any, step: StepAnswer | None) -> None:
        """Put a request's results into its output, when it is time.

        Args:
            output: an `EngineCoreOutput`, edited in place.
            step: the step that it is of.
        """
        request_id = output.request_id
        always = self._sends_always.get(request_id)
        if always is None or not (always or output.finish_reason is not None):
            return
        answer = self._unsent.pop(request_id, None) or RawAnswer()
        if step is not None:
            # Totals come with each step: those of the last one are the request's.
            answer.add_totals(step, request_id)
        params = output.kv_transfer_params or {}
        output.kv_transfer_params = {**params, KEY: answer.to_plain()}
        if output.finish_reason is not None:
            self._forget(request_id)

    def forget_gone(self, requests: Mapping[str, Any]) -> None:
        """Drop the results of requests that the scheduler no longer has."""
        for request_id in [i for i in self._sends_always if i not in requests]:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._sends_always.pop(request_id, None)
        self._unsent.pop(request_id, None)


def _sends_always(request: Any) -> bool:
    params = request.sampling_params
    if params.stop:
        return True
    try:
        asked = json.loads(params.extra_args[KEY])
    except ValueError:
        return False
    return isinstance(asked, dict) and bool(asked.get("stream_scores"))
