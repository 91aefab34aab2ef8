"""The front end's part of the road back: `RequestOutput.eyesplice`.

add_request      learns a request's id in the engine core
decode           completes what another process sent
process_outputs  takes the results out of the core's outputs again
_new_completion_output, _new_request_output
                 put the answer where the client finds it; wrapped on the request that
                 has one, and before the outputs that can hold it, so that no other
                 token costs anything
RequestOutput.add
                 joins the answers of outputs that are joined
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final
from weakref import ref

from eyesplice.integration import answers, array_frames, ledger
from eyesplice.integration.answer_body import first_answer, joined
from eyesplice.integration.answers import Record
from eyesplice.integration.config import KEY
from eyesplice.integration.later import AnswerField, Later

logger = logging.getLogger("vllm.eyesplice")

ANSWER: Final = AnswerField(KEY)
"""`CompletionOutput.eyesplice` and `RequestOutput.eyesplice`."""


def attach() -> None:
    """Wrap vLLM's methods in this process; safe to call again."""
    from vllm.outputs import CompletionOutput, RequestOutput

    from eyesplice.integration.plugin import wrap

    for output in (CompletionOutput, RequestOutput):
        if not hasattr(output, KEY):
            setattr(output, KEY, ANSWER)
    wrap(ledger.PROCESSOR_ADD_REQUEST, _add_request)
    wrap(ledger.PROCESSOR_ABORT, _abort_requests)
    wrap(ledger.DECODE, array_frames.decode)
    wrap(ledger.PROCESS_OUTPUTS, _process_outputs)
    wrap(ledger.MERGE_OUTPUTS, _merge_outputs)


def _add_request(
    original: Callable[..., None],
    processor: Any,
    request: Any,
    prompt: str | None,
    parent_req: Any = None,
    request_index: int = 0,
    *args: Any,
    **kwargs: Any,
) -> None:
    more = parent_req is not None and request_index < parent_req.n - 1
    answers.admit(request, keep=more)
    original(processor, request, prompt, parent_req, request_index, *args, **kwargs)
    params = request.sampling_params
    record = answers.record_of(request.request_id)
    # The detokenizer ends a request at its stop strings; all other ends come from the
    # engine core.
    if record is not None and (record.asked.stream_scores or (params and params.stop)):
        _answer_from_now(processor, request.request_id)


def _answer_from_now(processor: Any, request_id: str) -> None:
    """Make the next outputs of a request carry its answer, if it is owed one."""
    record = answers.record_of(request_id)
    state = processor.request_states.get(request_id)
    if record is not None and state is not None:
        _answer_with(state, record)


def _answer_with(state: Any, record: Record) -> None:
    """Make the outputs of one request carry its answer; safe to call again.

    The request holds what makes its outputs, which therefore must not hold the request:
    its results would stay until the garbage collector finds them.
    """
    completion, whole = ledger.NEW_COMPLETION_OUTPUT, ledger.NEW_REQUEST_OUTPUT
    for name, around in (
        (completion, _new_completion_output),
        (whole, _new_request_output),
    ):
        original = getattr(type(state), name.attribute)
        setattr(state, name.attribute, partial(around, original, ref(state), record))


def _abort_requests(
    original: Callable[..., list[str]],
    processor: Any,
    request_ids: Iterable[str],
    internal: bool,
) -> list[str]:
    given = list(request_ids)
    ids = given
    if not internal:
        # A list of ids for each that a client gave. It may be a defaultdict.
        inside = processor.external_req_ids
        ids = [one for each in given if each in inside for one in inside[each]]
    for request_id in ids:
        _answer_from_now(processor, request_id)
    aborted = original(processor, given, internal)
    for request_id in aborted:
        answers.forget(request_id)
    return aborted


def _process_outputs(
    original: Callable[..., Any],
    processor: Any,
    engine_core_outputs: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not answers.owed():
        return original(processor, engine_core_outputs, *args, **kwargs)
    for output in engine_core_outputs:
        params = output.kv_transfer_params
        if params and KEY in params:
            answers.receive(output.request_id, params[KEY])
            rest = {key: value for key, value in params.items() if key != KEY}
            output.kv_transfer_params = rest or None
        if output.finish_reason is not None:
            _answer_from_now(processor, output.request_id)
    result = original(processor, engine_core_outputs, *args, **kwargs)
    states = processor.request_states
    for output in [o for o in engine_core_outputs if o.request_id not in states]:
        answers.forget(output.request_id)
    return result


def _new_completion_output(
    original: Callable[..., Any],
    state_of: Callable[[], Any],
    record: Record,
    token_ids: list[int],
    finish_reason: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    state = state_of()
    output = original(state, token_ids, finish_reason, *args, **kwargs)
    delta = state.output_kind.name == "DELTA"
    finished = finish_reason is not None
    make = partial(_answer, record, state.request_id, finished=finished, delta=delta)
    # What is streamed depends on what was given before.
    now = record.asked.stream_scores or not finished
    setattr(output, KEY, make() if now else Later(make))
    return output


def _answer(
    record: Record, request_id: str, *, finished: bool, delta: bool
) -> dict[str, Any] | None:
    try:
        return record.answer(finished=finished, delta=delta)
    except Exception as error:
        # vLLM ends the whole server when the outputs of one request cannot be made.
        logger.exception("no answer for request %s", request_id)
        return {"error": f"its answer could not be made: {error!r}"}


def _new_request_output(
    original: Callable[..., Any],
    state_of: Callable[[], Any],
    record: Record,
    *args: Any,
    **kwargs: Any,
) -> Any:
    output = original(state_of(), *args, **kwargs)
    # A pooling request has one output, not a list of them, and never an answer.
    if isinstance(output.outputs, list):
        held = (ANSWER.held(part) for part in output.outputs)
        answer = next((one for one in held if one is not None), None)
        if answer is not None:
            setattr(output, KEY, answer)
    return output


def _merge_outputs(
    original: Callable[..., None], output: Any, later: Any, aggregate: bool
) -> None:
    """vLLM's `RequestOutput.add`: several outputs that a slow client takes as one."""
    if getattr(output, KEY) is None and getattr(later, KEY) is None:
        original(output, later, aggregate)
        return
    before = {part.index: getattr(part, KEY, None) for part in output.outputs}
    original(output, later, aggregate)
    after = {part.index: getattr(part, KEY, None) for part in later.outputs}
    for part in output.outputs:
        earlier = before.get(part.index) if aggregate else None
        if part.index in after:
            setattr(part, KEY, joined(earlier, after[part.index]))
    setattr(output, KEY, first_answer(output.outputs, KEY))
