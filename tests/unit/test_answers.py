"""The road back, from the worker's steps to the object that a client gets."""

import base64
import copy
import gc
import itertools
import pickle
import weakref
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eyesplice.fx_passes.program import (
    CaptureInfo,
    FunctionInfo,
    Program,
    ScoreInfo,
)
from eyesplice.fx_passes.request import Request
from eyesplice.fx_passes.sites import Site
from eyesplice.integration import answers, output_hook
from eyesplice.integration.answer_body import Asked, body, joined, new_scores
from eyesplice.integration.captured import Captured
from eyesplice.integration.raw_answers import RawAnswer, StepAnswer, StepScores
from eyesplice.integration.scheduler_hook import update_from_output
from eyesplice.ops.layout import Reduce, Scope

TEXT = Request().canonical()
SERIALS = itertools.count()


def function(name, kernel, layers=(0,), kind="read", **more) -> FunctionInfo:
    submodule = "router.logits" if kernel == "router" else "residual.post"
    return FunctionInfo(
        name=name, kind=kind, kernel=kernel, layers=layers, submodule=submodule, **more
    )


def program(functions, scores=(), captures=()) -> Program:
    return Program("sha256:1", (), {}, tuple(functions), tuple(scores), tuple(captures))


def step(place=(), scores=None, captures=None, errors=None, counts=None) -> StepAnswer:
    """A step of requests with these slots; a count of 3 acted, 5 evaluated by default.

    Captures are positions and bytes, by request and capture.
    """
    place = dict(place)
    slots = 1 + max(place.values(), default=0)
    default = np.tile(np.array([[3], [5]], dtype=np.int32), (slots, 1, 4))
    return StepAnswer(
        serial=next(SERIALS),
        place=place,
        first_slot=0,
        counts=default if counts is None else counts,
        lost=np.zeros(slots, dtype=np.int32),
        scores=step_scores(place, scores) if scores else None,
        captures={
            request: [
                Captured(np.full_like(at, index), at, data)
                for index, (at, data) in found.items()
            ]
            for request, found in (captures or {}).items()
        },
        errors=errors or {},
        dtype="float32",
        widths={"residual.post": 2},
    )


def step_scores(place, scores) -> StepScores:
    """Of requests with these slots: first position and rows `[tokens, scores]` each."""
    rows = [found for _, found in scores.values()]
    lengths = np.array([len(found) for found in rows])
    return StepScores(
        requests=list(scores),
        slots=np.array([place[request] for request in scores]),
        columns=np.array([found.shape[1] for found in rows]),
        first_position=np.array([first for first, _ in scores.values()]),
        first_row=np.cumsum(lengths) - lengths,
        lengths=lengths,
        rows=np.concatenate(rows),
    )


def add(answer: RawAnswer, found: StepAnswer, request="a") -> None:
    if found.scores is not None:
        first, rows = found.scores.of(found.scores.requests.index(request))
        answer.add_scores(np.arange(first, first + len(rows), dtype=np.int32), rows)
    answer.add_captures(found.captures.get(request, ()))


def raw(found: StepAnswer, request="a") -> RawAnswer:
    answer = RawAnswer()
    add(answer, found, request)
    answer.add_totals(found, request)
    return answer


def floats(*rows) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def row_bytes(*rows, dtype=torch.float32) -> np.ndarray:
    return torch.tensor(rows, dtype=dtype).view(torch.uint8).numpy()


def positions(*values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_apps_vectors_writes_and_gates_are_named():
    functions = [
        function("guarded/gate", "probe", app="guarded"),
        function("guarded/1", "steering_vector", (1, 2), "write", app="guarded"),
        function("writes/0", "ablate", kind="write", gated=True),
    ]
    asked = Asked(program(functions), {"pirate": "sha256:2"}, ("guarded",))
    answer = body(asked, raw(step({"a": 1})))
    assert answer["apps"] == ["guarded"]
    assert answer["vectors"] == {"pirate": "sha256:2"}
    assert answer["writes"] == [
        {
            "function": "guarded/1",
            "layers": [1, 2],
            "submodule": "residual.post",
            "tokens": 3,
        },
        {
            "function": "writes/0",
            "layers": [0],
            "submodule": "residual.post",
            "tokens": 3,
        },
    ]
    assert answer["gates"] == {"writes/0": {"passed": 3, "evaluated": 5}}
    assert answer["scores"] == answer["captures"] == {}
    assert "error" not in answer and "experts" not in answer


def test_scores_of_several_layers_are_a_list_and_unread_tokens_are_left_out():
    scores = [ScoreInfo(0, layer, None, Scope.NONE) for layer in (4, 7)]
    asked = Asked(program([function("p", "probe", (4, 7))], scores), {})
    nan = np.nan
    found = step({"a": 1}, {"a": (10, floats([1, nan], [2, 3], [nan, nan]))})
    assert body(asked, raw(found))["scores"]["p"] == [
        {"layer": 4, "values": [1.0, 2.0], "positions": [10, 11]},
        {"layer": 7, "values": [3.0], "positions": [11]},
    ]


def test_sae_features_are_a_row_per_token():
    scores = [ScoreInfo(0, 3, feature, Scope.NONE) for feature in range(2)]
    asked = Asked(program([function("s", "sae", (3,))], scores), {})
    found = step({"a": 1}, {"a": (0, floats([1, 2], [np.inf, 4]))})
    score = body(asked, raw(found))["scores"]["s"]
    largest = float(np.finfo(np.float32).max)
    assert score == {
        "layer": 3,
        "values": [[1.0, 2.0], [largest, 4.0]],
        "positions": [0, 1],
    }


def test_a_position_that_comes_again_overwrites():
    scores = [ScoreInfo(0, 0, None, Scope.NONE)]
    asked = Asked(program([function("p", "probe")], scores), {})
    answer = raw(step({"a": 1}, {"a": (0, floats([1], [2], [3]))}))
    add(answer, step({"a": 1}, {"a": (1, floats([8], [9], [10]))}))
    score = body(asked, answer)["scores"]["p"]
    assert score["values"] == [1.0, 8.0, 9.0, 10.0]


def test_captures_of_one_hook_point_are_put_together():
    site = Site(2, "residual.post")
    functions = [function("x", "capture"), function("y", "capture")]
    captures = [CaptureInfo(0, site), CaptureInfo(1, site)]
    asked = Asked(program(functions, (), captures), {})
    found = {
        0: (positions(4, 1), row_bytes([4.0, 4.5], [1.0, 1.5])),
        1: (positions(2), row_bytes([2.0, 2.5])),
    }
    answer = body(asked, raw(step({"a": 1}, captures={"a": found})))
    capture = answer["captures"]["blocks.2.hook_resid_post"]
    assert capture["shape"] == [3, 2] and capture["dtype"] == "float32"
    assert capture["positions"] == [1, 2, 4]
    values = np.frombuffer(base64.b64decode(capture["data"]), np.float32)
    assert values.tolist() == [1.0, 1.5, 2.0, 2.5, 4.0, 4.5]


def test_nothing_captured_is_an_empty_capture():
    captures = [CaptureInfo(0, Site(2, "residual.post"))]
    asked = Asked(program([function("x", "capture")], (), captures), {})
    capture = body(asked, raw(step({"a": 1})))["captures"]["blocks.2.hook_resid_post"]
    assert capture["positions"] == [] and capture["shape"] == [0, 2]
    assert capture["data"] == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_router_reads_give_the_best_experts(dtype):
    functions = [function("r", "router", (1, 2), top_k=2)]
    captures = [CaptureInfo(0, Site(layer, "router.logits")) for layer in (1, 2)]
    asked = Asked(program(functions, (), captures), {})
    found = {
        0: (positions(0), row_bytes([0.5, -1.0, 2.0], dtype=dtype)),
        1: (positions(0), row_bytes([0.5, 3.0, -2.0], dtype=dtype)),
    }
    answer = raw(step({"a": 1}, captures={"a": found}))
    answer.dtype = str(dtype).removeprefix("torch.")
    assert body(asked, answer)["experts"]["r"] == [
        {"layer": 1, "experts": [[2, 0]], "positions": [0]},
        {"layer": 2, "experts": [[1, 0]], "positions": [0]},
    ]
    assert body(asked, answer)["captures"] == {}


def test_a_request_served_without_effect_says_why():
    asked = Asked(None, {}, error="no vector x")
    answer = body(asked, None)
    assert answer["error"] == "no vector x" and answer["writes"] == []
    silent = body(Asked(program([]), {}), None)
    assert "before the engine reported anything" in silent["error"]


@pytest.mark.parametrize(
    "found", [None, RawAnswer(), raw(step(errors={"a": "ran without effect: v"}))]
)
def test_an_answer_without_results_has_every_function(found):
    """Of a request that was aborted, or that the worker could not run as asked."""
    functions = [
        function("p", "probe", (4, 7)),
        function("s", "sae"),
        function("m", "dot", reduce=Reduce.MEAN),
        function("r", "router", top_k=2),
        function("c", "capture"),
    ]
    scores = [ScoreInfo(0, 4, None, Scope.NONE), ScoreInfo(0, 7, None, Scope.NONE)]
    scores += [ScoreInfo(1, 0, feature, Scope.NONE) for feature in (3, 9)]
    scores += [ScoreInfo(2, 0, None, Scope.NONE)]
    sites = (Site(0, "router.logits"), Site(0, "residual.post"))
    captures = [CaptureInfo(3, sites[0]), CaptureInfo(4, sites[1])]
    asked = Asked(program(functions, scores, captures), {})
    answer = body(asked, found)
    empty = [{"layer": layer, "values": [], "positions": []} for layer in (4, 7, 0)]
    assert answer["scores"] == {"p": empty[:2], "s": empty[2], "m": empty[2]}
    assert answer["experts"]["r"]["experts"] == []
    assert answer["captures"]["blocks.0.hook_resid_post"]["positions"] == []
    assert ("error" in answer) == (found is None or found.error is not None)
    assert found is None or new_scores(asked, found, -1) is None


def pickled(output):
    return pickle.loads(pickle.dumps(output))


class Output(SimpleNamespace):
    """An output of vLLM's, once `attach` has been called."""

    eyesplice = output_hook.ANSWER


def test_an_answer_that_cannot_be_made_harms_nobody_else(monkeypatch):
    """vLLM's front end ends with an exception that leaves the making of an output."""
    record = answers.Record(Asked(program([]), {}))
    state = SimpleNamespace(request_id="a", output_kind=SimpleNamespace(name="DELTA"))

    def original(_state, token_ids, finish_reason):
        return Output(token_ids=token_ids, finish_reason=finish_reason)

    monkeypatch.setattr(answers, "body", lambda *_: 1 / 0)
    make = output_hook._new_completion_output
    output = make(original, lambda: state, record, [1, 2], "stop")
    assert output.token_ids == [1, 2]
    assert "ZeroDivisionError" in output.eyesplice["error"]


class _State:
    """A request of vLLM's output processor."""

    request_id = "a"
    output_kind = SimpleNamespace(name="FINAL_ONLY")

    def _new_completion_output(self, token_ids, finish_reason):
        return Output(token_ids=token_ids)

    def _new_request_output(self, outputs):
        return Output(outputs=outputs)


def test_results_go_with_the_request_and_not_with_the_next_garbage_collection():
    state, record = _State(), answers.Record(Asked(program([]), {}))
    output_hook._answer_with(state, record)
    part = state._new_completion_output([1], "stop")
    whole = state._new_request_output([part])
    assert whole.eyesplice == part.eyesplice == body(record.asked, None)
    gone = weakref.ref(state)
    gc.disable()
    try:
        del state
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def made(monkeypatch):
    """The answers that were made, in order."""
    found = []
    monkeypatch.setattr(
        answers, "body", lambda *args: found.append(args) or {"n": len(found)}
    )
    return found


def test_an_answer_is_made_when_somebody_looks_and_once(made):
    state, record = _State(), answers.Record(Asked(program([]), {}))
    output_hook._answer_with(state, record)
    part = state._new_completion_output([1], "stop")
    whole = state._new_request_output([part])
    assert not made
    assert whole.eyesplice == {"n": 1} and part.eyesplice is whole.eyesplice
    assert len(made) == 1


def test_streamed_scores_are_made_with_their_output(made):
    asked = Asked(program([]), {}, stream_scores=True)
    state, record = _State(), answers.Record(asked)
    output_hook._answer_with(state, record)
    part = state._new_completion_output([1], "stop")
    assert len(made) == 1 and part.eyesplice == {"n": 1}


@pytest.mark.parametrize("whole", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_an_output_has_its_answer(made, whole):
    state, record = _State(), answers.Record(Asked(program([]), {}))
    output_hook._answer_with(state, record)
    output = state._new_completion_output([1], "stop")
    other = whole(output)
    assert other.eyesplice == output.eyesplice == {"n": 1}


def test_an_output_without_an_answer_has_none():
    assert Output().eyesplice is None and Output.eyesplice is None


class Processor:
    """vLLM's output processor with running requests a and b, and c that asked nothing."""

    def __init__(self, monkeypatch, **asked) -> None:
        records = {
            name: answers.Record(Asked(program([]), {}, **asked)) for name in "ab"
        }
        monkeypatch.setattr(answers, "_running", records)
        self.request_states = {name: _State() for name in "abc"}
        self.external_req_ids = defaultdict(list, {"A": ["a"], "C": ["c"]})

    def answering(self):
        """The requests whose next output would hold an answer."""
        states = self.request_states.items()
        return {name for name, state in states if vars(state)}

    def step(self, **finished) -> None:
        outputs = [
            SimpleNamespace(
                request_id=name,
                kv_transfer_params=None,
                finish_reason=finished.get(name),
            )
            for name in self.request_states
        ]
        output_hook._process_outputs(lambda *_: None, self, outputs)

    def add(self, name, stop=()) -> None:
        request = SimpleNamespace(
            request_id=name,
            external_req_id=None,
            sampling_params=SimpleNamespace(stop=list(stop), extra_args=None),
        )
        output_hook._add_request(lambda *_: None, self, request, None)


def test_only_an_output_that_can_hold_an_answer_costs_anything(monkeypatch):
    processor = Processor(monkeypatch)
    for name in "abc":
        processor.add(name)
    processor.step()
    assert not processor.answering()
    processor.step(a="length", c="stop")
    assert processor.answering() == {"a"}


def test_a_request_that_ends_at_its_stop_strings_can_end_at_any_token(monkeypatch):
    processor = Processor(monkeypatch)
    processor.add("a", stop=["end"])
    processor.add("b")
    processor.add("c", stop=["end"])
    assert processor.answering() == {"a"}


def test_scores_that_are_streamed_come_with_any_token(monkeypatch):
    processor = Processor(monkeypatch, stream_scores=True)
    processor.add("a")
    assert processor.answering() == {"a"}


@pytest.mark.parametrize(
    ("ids", "internal", "expected"),
    [
        (["A", "C", "no such"], False, {"a"}),
        (["a", "c", "no such"], True, {"a"}),
        (iter(["b"]), True, {"b"}),
        (["a"], False, set()),
    ],
)
def test_the_last_output_of_an_aborted_request_holds_its_answer(
    monkeypatch, ids, internal, expected
):
    processor = Processor(monkeypatch)
    seen = []

    def original(processor, ids, internal):
        seen.append((list(ids), internal, processor.answering()))
        return []

    given = list(ids)
    output_hook._abort_requests(original, processor, iter(given), internal)
    assert seen == [(given, internal, expected)]
    assert set(processor.external_req_ids) == {"A", "C"}


def test_parts_of_a_stream_join_to_the_whole():
    functions = [function("p", "probe", (4, 7)), function("s", "sae")]
    scores = [ScoreInfo(0, layer, None, Scope.NONE) for layer in (4, 7)]
    scores.append(ScoreInfo(1, 0, 0, Scope.NONE))
    asked = Asked(program(functions, scores), {}, stream_scores=True)
    rows = floats([1, 2, 3], [4, 5, 6], [7, 8, 9])
    first = raw(step({"a": 1}, {"a": (0, rows[:2])}))
    part = new_scores(asked, first, -1)
    every = raw(step({"a": 1}, {"a": (0, rows)}))
    last = body(asked, every, since=1)
    assert joined(part, last) == body(asked, every)
    assert joined(None, last) is last and joined(part, None) is part
    assert new_scores(asked, every, 2) is None


class FakeScheduler:
    """A scheduler whose step ends with the outputs that it is told."""

    def __init__(self, **params) -> None:
        defaults = {"stop": [], "extra_args": {"eyesplice": TEXT}}
        sampling = SimpleNamespace(**(defaults | params))
        self.request = SimpleNamespace(
            sampling_params=sampling, is_finished=lambda: False
        )
        self.requests = {"a": self.request}
        self.aborted: set[str] = set()

    def run(self, found, *, finish=False, params=None):
        """The output of one step of request a."""
        output = SimpleNamespace(
            request_id="a",
            finish_reason="stop" if finish else None,
            kv_transfer_params=params,
        )

        def original(scheduler, scheduler_output, runner_output):
            if finish:
                del scheduler.requests["a"]
            return {0: SimpleNamespace(outputs=[output])}

        runner_output = SimpleNamespace(**({"eyesplice": found} if found else {}))
        scheduled = SimpleNamespace(finished_req_ids=self.aborted)
        update_from_output(original, self, scheduled, runner_output)
        return output.kv_transfer_params


def test_the_engine_core_sends_with_the_last_output():
    serial = pytest.importorskip("vllm.v1.serial_utils")
    scheduler = FakeScheduler()
    for first in range(3):
        found = step({"a": 1}, {"a": (first, floats([first]))})
        assert scheduler.run(found) is None
    found = step(
        {"a": 1},
        {"a": (3, floats([3]))},
        {"a": {0: (positions(3), row_bytes([1.0]))}},
    )
    sent = scheduler.run(found, finish=True, params={"own": 1})
    sent = serial.MsgpackDecoder().decode(serial.MsgpackEncoder().encode(sent))
    assert sent["own"] == 1
    answer = RawAnswer()
    answer.add_plain(sent["eyesplice"])
    kept, scores = answer.score_rows()
    assert kept.tolist() == scores[:, 0].tolist() == [0, 1, 2, 3]
    assert answer.captured([0])[1].tobytes() == row_bytes([1.0]).tobytes()
    assert answer.counts == ([3] * 4, [5] * 4)
    assert scheduler._eyesplice_answers.is_empty


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["x"]},
        {"extra_args": {"eyesplice": '{"stream_scores": true}'}},
    ],
)
def test_it_sends_with_every_output_when_the_front_end_may_need_it(params):
    scheduler, answer = FakeScheduler(**params), RawAnswer()
    for first in range(3):
        sent = scheduler.run(step({"a": 1}, {"a": (first, floats([first]))}))
        answer.add_plain(sent["eyesplice"])
    assert answer.score_rows()[0].tolist() == [0, 1, 2]


def test_results_of_requests_that_are_gone_are_forgotten():
    scheduler = FakeScheduler()
    scheduler.run(step({"a": 1}, {"a": (0, floats([1]))}))
    assert not scheduler._eyesplice_answers.is_empty
    scheduler.requests.clear()
    scheduler.aborted.add("a")
    scheduler.run(step({"a": 1}, {"a": (1, floats([1]))}))
    assert scheduler._eyesplice_answers.is_empty


def test_an_engine_core_without_results_is_left_alone():
    scheduler = FakeScheduler()
    assert scheduler.run(None, params={"own": 1}) == {"own": 1}
    assert not hasattr(scheduler, "_eyesplice_answers")


class FakeRequest:
    """One of vLLM's, as far as the registry looks at it."""

    def __init__(self, internal="a-1234", external="a", text=TEXT) -> None:
        extra = {"eyesplice": text} if text else None
        self.request_id, self.external_req_id = internal, external
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.prompt_token_ids = [1, 2, 3]


def test_a_request_is_known_by_its_own_id_until_it_ends():
    answers.remember("a", program([]), Request(), text=TEXT)
    answers.admit(FakeRequest())
    record = answers.record_of("a-1234")
    assert record.asked.prompt_len == 3
    assert record.answer(finished=False, delta=True) is None
    answers.receive("a-1234", raw(step({"a": 1})).to_plain())
    assert "error" not in record.answer(finished=True, delta=True)
    answers.forget("a-1234")
    assert answers.record_of("a-1234") is None
    answers.admit(FakeRequest("a-5678"))
    assert answers.record_of("a-5678") is None, "the entry is used up"


@pytest.mark.parametrize("delta", [True, False])
def test_a_stream_gets_each_score_once_or_all_so_far(delta):
    scores = [ScoreInfo(0, 0, None, Scope.NONE)]
    asked = Asked(program([function("p", "probe")], scores), {}, stream_scores=True)
    record, given = answers.Record(asked), []
    # A preempted request comes back to positions that were given.
    for first, last in ((0, 3), (3, 4), (0, 5)):
        rows = floats(*([position] for position in range(first, last)))
        record.receive(raw(step({"a": 1}, {"a": (first, rows)})).to_plain())
        answer = record.answer(finished=last == 5, delta=delta)
        given.append(answer["scores"]["p"]["positions"])
    if delta:
        assert given == [[0, 1, 2], [3], [4]]
    else:
        assert given == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_every_sample_of_one_request_has_a_record():
    answers.remember("a", program([]), Request(), text=TEXT)
    for index in range(3):
        answers.admit(FakeRequest(f"{index}_a-1"), keep=index < 2)
    records = [answers.record_of(f"{index}_a-1") for index in range(3)]
    assert all(records) and len({id(record) for record in records}) == 3
    for index in range(3):
        answers.forget(f"{index}_a-1")
    assert answers.owed() == 0


def test_a_request_of_the_same_id_that_asks_for_nothing_has_none():
    answers.remember("a", program([]), Request(), text=TEXT)
    answers.admit(FakeRequest("a-9", text=None))
    assert answers.record_of("a-9") is None
    answers.remember("a", None, None, "no vector x")
    answers.admit(FakeRequest("a-9", text=None))
    found = answers.record_of("a-9").answer(finished=True, delta=False)
    assert found["error"] == "no vector x"
    answers.forget("a-9")
