"""The engine core's part of the road back: adds results up and sends them on.

A request's results leave with the output that finishes it, under our key of
`kv_transfer_params`: the one field of an `EngineCoreOutput` that holds any object. With
every output they leave when the client wants its scores as they come, and when a stop
string may end the request: then it is the front end that finishes it.

A preempted request loses what the worker counted. All its tokens are computed again.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from eyesplice.integration.config import KEY
from eyesplice.integration.raw_answers import RawAnswer, StepAnswer
from eyesplice.integration.score_window import ScoreWindow

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
        state.send(of_client.outputs, step)
    if step is None or scheduler_output.finished_req_ids:
        state.forget_gone(scheduler.requests)
    return outputs


def preempt_request(
    original: Callable[..., Any],
    scheduler: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """vLLM's `Scheduler._preempt_request`: ours do not come back from the cache."""
    params = request.sampling_params
    if params is not None and KEY in (params.extra_args or {}):
        request.skip_reading_prefix_cache = True
    return original(scheduler, request, *args, **kwargs)


class CoreAnswers:
    """The unsent results of one engine core's requests."""

    def __init__(self) -> None:
        self._unsent: dict[str, RawAnswer] = {}
        self._sends_always: dict[str, bool] = {}
        self._num_always = 0
        self._serial = -1
        self._window = ScoreWindow(self._take_scores)

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
        if step.serial != self._serial:
            self._meet(step, requests)
            self._serial = step.serial
        if step.scores is not None:
            self._window.add(step.serial, step.scores)
        for request_id, captures in step.captures.items():
            if request_id in self._sends_always:
                self._unsent.setdefault(request_id, RawAnswer()).add_captures(captures)

    def _meet(self, step: StepAnswer, requests: Mapping[str, Any]) -> None:
        for request_id in (*step.place, *step.errors):
            if request_id in self._sends_always:
                continue
            request = requests.get(request_id)
            if request is not None and not request.is_finished():
                always = _sends_always(request)
                self._sends_always[request_id] = always
                self._num_always += always

    def _take_scores(
        self,
        request_id: str,
        positions: NDArray[np.int32],
        scores: NDArray[np.float32],
    ) -> None:
        if request_id in self._sends_always:
            self._unsent.setdefault(request_id, RawAnswer()).add_scores(
                positions, scores
            )

    def send(self, outputs: Iterable[Any], step: StepAnswer | None) -> None:
        """Put requests' results into their outputs, where it is time.

        Args:
            outputs: of the type `EngineCoreOutput`, edited in place.
            step: the step that they are of.
        """
        if not self._num_always:
            outputs = [out for out in outputs if out.finish_reason is not None]
        for output in outputs:
            always = self._sends_always.get(output.request_id)
            if always or (always is not None and output.finish_reason is not None):
                self._send(output, step)

    def _send(self, output: Any, step: StepAnswer | None) -> None:
        request_id = output.request_id
        self._window.flush(request_id)
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
        self._num_always -= bool(self._sends_always.pop(request_id, False))
        self._unsent.pop(request_id, None)
        self._window.forget(request_id)


def _sends_always(request: Any) -> bool:
    params = request.sampling_params
    if params.stop:
        return True
    try:
        asked = json.loads(params.extra_args[KEY])
    except ValueError:
        return False
    return isinstance(asked, dict) and bool(asked.get("stream_scores"))
