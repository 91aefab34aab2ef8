"""What the hooks do with a preempted request, on stand-ins of scheduler and runner."""

from types import SimpleNamespace

import pytest

from eyesplice.fx_passes.request import Request
from eyesplice.integration import ledger
from eyesplice.integration.config import KEY
from eyesplice.integration.private_name import PrivateName
from eyesplice.integration.runners import RunnerHooks
from eyesplice.integration.scheduler_hook import preempt_request
from tests.unit.test_results import World, answer, probing

PROMPT = 4


class Scheduled:
    """A request of the engine core, and a scheduler that can preempt it."""

    def __init__(self, params) -> None:
        self.sampling_params = params
        self.skip_reading_prefix_cache = False
        self.calls = []

    def preempt(self, *args, **kwargs):
        def original(*given, **named):
            self.calls.append((given, named, self.skip_reading_prefix_cache))
            return "done"

        return preempt_request(original, "scheduler", self, *args, **kwargs)


def test_a_request_with_our_key_computes_everything_again():
    request = Scheduled(SimpleNamespace(extra_args={KEY: "{}"}))
    assert request.preempt(1.5, drop_stale_output=True) == "done"
    expected = ("scheduler", request, 1.5), {"drop_stale_output": True}, True
    assert request.calls == [expected]


@pytest.mark.parametrize(
    "params",
    [None, *(SimpleNamespace(extra_args=args) for args in (None, {}, {"other": 1}))],
)
def test_a_request_without_our_key_is_left_alone(params):
    request = Scheduled(params)
    assert request.preempt(1.5) == "done"
    assert request.calls == [(("scheduler", request, 1.5), {}, False)]
    assert not request.skip_reading_prefix_cache


class Runner:
    """Has the methods of one of vLLM's runners, which do nothing."""

    def __init__(self, *names: PrivateName) -> None:
        for name in (*names, ledger.EXECUTE_MODEL, ledger.SAMPLE_TOKENS):
            setattr(self, name.attribute, lambda *args: None)


def tell_v1(runner, request, preempted=(), finished=(), new=None, resumed=None):
    cached = SimpleNamespace(
        req_ids=["other", request.name],
        num_computed_tokens=[9, resumed],
        resumed_req_ids=set() if resumed is None else {request.name},
    )
    output = SimpleNamespace(
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
        scheduled_new_reqs=[] if new is None else [request.new(new)],
        scheduled_cached_reqs=cached,
    )
    getattr(runner, ledger.V1_UPDATE_STATES.attribute)(output)


def tell_v2(runner, request, preempted=(), finished=(), new=None, resumed=None):
    position = resumed if new is None else new
    output = SimpleNamespace(
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
        scheduled_new_reqs=[] if position is None else [request.new(position)],
    )
    getattr(runner, ledger.V2_FINISH_REQUESTS.attribute)(output)
    getattr(runner, ledger.V2_ADD_REQUESTS.attribute)(output)


RUNNERS = {
    tell_v1: (ledger.V1_UPDATE_STATES, ledger.V1_PREPARE_INPUTS, ledger.V1_DUMMY_RUN),
    tell_v2: (
        ledger.V2_FINISH_REQUESTS,
        ledger.V2_ADD_REQUESTS,
        ledger.V2_PREPARE_INPUTS,
    ),
}


class Served:
    """One request with a probe, a capture and a write, on one of the runners."""

    name = "a"

    def __init__(self, tell, monkeypatch) -> None:
        self.world, self.program = World(), probing()
        monkeypatch.setattr(RunnerHooks, "_lower", lambda *_: self.program)
        hooks = RunnerHooks(self.world.router, self.world.results, lambda: None)
        self.runner = Runner(*RUNNERS[tell])
        hooks.attach(self.runner)
        self._tell = tell

    def new(self, position):
        return SimpleNamespace(
            req_id=self.name,
            sampling_params=SimpleNamespace(extra_args={KEY: Request().canonical()}),
            prompt_token_ids=[1] * PROMPT,
            num_computed_tokens=position,
        )

    def tell(self, **what):
        self._tell(self.runner, self, **what)

    def step(self, first, stop):
        self.world.step(**{self.name: (first, stop)})

    @property
    def answer(self):
        return answer(self.world, self.name, self.program, PROMPT)


@pytest.fixture(params=RUNNERS, ids=["v1", "v2"])
def served(request, monkeypatch) -> Served:
    return Served(request.param, monkeypatch)


def test_a_request_that_is_resumed_at_its_start_is_counted_once(served: Served):
    served.tell(new=0)
    served.step(0, 4)
    served.step(4, 5)
    served.tell(preempted=["a"])
    served.tell(resumed=0)
    served.step(0, 6)
    assert "error" not in served.answer
    assert served.answer["writes"][0]["tokens"] == 6
    assert served.answer["scores"]["probe"]["positions"] == list(range(6))
    served.tell(finished=["a"])
    assert served.world.router.active_requests == 0


def test_a_request_that_is_resumed_later_says_that_its_counts_are_short(
    served: Served,
):
    served.tell(new=0)
    served.step(0, 4)
    served.tell(preempted=["a"])
    served.tell(resumed=3)
    served.step(3, 6)
    assert "leave out the first 3 tokens" in served.answer["error"]
    assert served.answer["writes"][0]["tokens"] == 3
    # The rows from before have been sent, and stay.
    assert served.answer["scores"]["probe"]["positions"] == list(range(6))
    assert served.answer["captures"]["blocks.0.hook_resid_mid"]["positions"] == [
        *range(6)
    ]
    # The step after is of an equal batch.
    served.step(6, 7)
    assert "leave out the first 3 tokens" in served.answer["error"]


def test_the_next_request_of_that_name_has_no_error(served: Served):
    served.tell(new=0)
    served.step(0, 4)
    served.tell(preempted=["a"])
    served.tell(resumed=3)
    served.step(3, 6)
    served.tell(finished=["a"])
    served.world.raw.clear()
    served.tell(new=0)
    served.step(0, 4)
    assert "error" not in served.answer


def test_a_prompt_that_a_cache_holds_is_no_error(served: Served):
    served.tell(new=2)
    served.step(2, 4)
    assert "error" not in served.answer


def test_a_request_that_ends_while_it_waits_leaves_nothing(served: Served):
    served.tell(new=0)
    served.step(0, 4)
    served.tell(preempted=["a"])
    served.tell(finished=["a"])
    assert served.world.router.active_requests == 0
    assert served.world.router.live_programs == 0
