"""Connects the router to vLLM's two model runners, on the instance.

V1    _update_states -> begin/end, preempt/resume
      _prepare_inputs -> step    _dummy_run -> clear
V2    finish_requests -> end, preempt    add_requests -> begin, resume
      prepare_inputs -> step
both  sample_tokens, or execute_model where that gives the output -> results
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.request import parse_canonical
from eyesplice.integration import ledger
from eyesplice.integration.config import KEY
from eyesplice.integration.private_name import PrivateName
from eyesplice.integration.results import Pending, Results
from eyesplice.integration.router import Router, prompt_length

logger = logging.getLogger("vllm.eyesplice")

_KNOWN_TEXTS: Final = 1024
"""Requests whose programs are remembered: many clients send the same few."""


class RunnerHooks:
    """The wrappers of one runner's methods."""

    def __init__(
        self, router: Router, results: Results, context: Callable[[], Context]
    ) -> None:
        """Hooks that route for `router`; `context` is asked once programs arrive."""
        self.router = router
        self._results = results
        self._context = context
        self._lowered = lru_cache(maxsize=_KNOWN_TEXTS)(self._lower)

    def attach(self, runner: Any) -> None:
        """Wrap the methods of a runner.

        Raises:
            TypeError: a runner that is neither V1's nor V2's.
        """
        if hasattr(runner, ledger.V1_PREPARE_INPUTS.attribute):
            _around(runner, ledger.V1_UPDATE_STATES, self._v1_update_states)
            _around(runner, ledger.V1_PREPARE_INPUTS, self._v1_prepare_inputs)
            _around(runner, ledger.V1_DUMMY_RUN, self._v1_dummy_run)
        elif hasattr(runner, ledger.V2_PREPARE_INPUTS.attribute):
            _around(runner, ledger.V2_FINISH_REQUESTS, self._v2_finish_requests)
            _around(runner, ledger.V2_ADD_REQUESTS, self._v2_add_requests)
            _around(runner, ledger.V2_PREPARE_INPUTS, self._v2_prepare_inputs)
        else:
            raise TypeError(f"eyesplice does not know the runner {type(runner)}")
        _around(runner, ledger.EXECUTE_MODEL, self._execute_model)
        _around(runner, ledger.SAMPLE_TOKENS, self._sample_tokens)

    def _begin(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            if self.router.awaits(new.req_id):
                # V2 is told of a resumed request as of a new one.
                self.router.resume(new.req_id, new.num_computed_tokens)
                continue
            self.router.end(new.req_id)
            params = new.sampling_params
            text = (params.extra_args or {}).get(KEY) if params else None
            if text is None:
                continue
            try:
                program = self._lowered(text)
            except SpecError as error:
                # The front end has admitted it. Only files that changed between the
                # starts of both lead here, and no other request may pay for that.
                logger.error("request %s runs UNSTEERED: %s", new.req_id, error)
                self.router.refuse(new.req_id, f"ran without effect: {error}")
                continue
            self.router.begin(
                new.req_id, program, prompt_length(new), new.num_computed_tokens
            )

    def _lower(self, text: str) -> Program:
        context = self._context()
        return lower(parse_canonical(text, context), context)

    def _end(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.preempted_req_ids or ():
            self.router.preempt(request_id)
        for request_id in scheduler_output.finished_req_ids:
            self.router.end(request_id)

    def _v1_update_states(
        self, original: Callable[..., Any], runner: Any, scheduler_output: Any
    ) -> Any:
        self._end(scheduler_output)
        self._begin(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            place = cached.req_ids.index(request_id)
            self.router.resume(request_id, cached.num_computed_tokens[place])
        return original(scheduler_output)

    def _v1_prepare_inputs(
        self,
        original: Callable[..., Any],
        runner: Any,
        scheduler_output: Any,
        num_scheduled_tokens: Any,
        *args: Any,
    ) -> Any:
        result = original(scheduler_output, num_scheduled_tokens, *args)
        batch = runner.input_batch
        self.router.step(
            batch.req_ids[: batch.num_reqs],
            runner.query_start_loc.gpu,
            runner.positions,
            runner.input_ids.gpu,
            scheduler_output.total_num_scheduled_tokens,
            num_scheduled_tokens,
        )
        return result

    def _v1_dummy_run(
        self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.router.clear()
        return original(*args, **kwargs)

    def _v2_finish_requests(
        self, original: Callable[..., Any], runner: Any, scheduler_output: Any
    ) -> Any:
        self._end(scheduler_output)
        return original(scheduler_output)

    def _v2_add_requests(
        self, original: Callable[..., Any], runner: Any, scheduler_output: Any
    ) -> Any:
        result = original(scheduler_output)
        self._begin(scheduler_output)
        return result

    def _v2_prepare_inputs(
        self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        batch = original(*args, **kwargs)
        self.router.step(
            batch.req_ids,
            batch.query_start_loc,
            batch.positions,
            batch.input_ids,
            batch.num_tokens,
            batch.num_scheduled_tokens,
        )
        return batch

    def _execute_model(
        self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("dummy_run"):
            self.router.clear()
        output = original(*args, **kwargs)
        # None means that `sample_tokens` gives the output; the step stays open for it.
        return output if output is None else self._with_results(output, self._launch())

    def _sample_tokens(
        self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The copies start before sampling does.
        pending = self._launch()
        return self._with_results(original(*args, **kwargs), pending)

    def _launch(self) -> Pending | None:
        step = self.router.take_step()
        return None if step is None else self._results.launch(step)

    @staticmethod
    def _with_results(output: Any, pending: Pending | None) -> Any:
        """Put the results on the output, once the host handles it."""
        if pending is None or output is None:
            return output
        if not hasattr(output, "get_output"):
            # An output without requests is an object that all steps share.
            if getattr(output, "req_ids", None):
                setattr(output, KEY, pending.join())
            return output
        get_output = output.get_output

        def with_results() -> Any:
            # It would hold itself, and with it the step's copies in pinned memory,
            # until the garbage collector comes.
            del output.get_output
            result = get_output()
            setattr(result, KEY, pending.join())
            return result

        output.get_output = with_results
        return output


def _around(runner: Any, name: PrivateName, hook: Callable[..., Any]) -> None:
    original = getattr(runner, name.attribute)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, runner, *args, **kwargs)

    setattr(runner, name.attribute, wrapper)
