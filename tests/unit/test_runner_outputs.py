"""A step's results on the runner's output, and what keeps them alive."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from eyesplice.integration.config import KEY
from eyesplice.integration.results import Pending
from eyesplice.integration.runners import RunnerHooks


class Copies:
    """Stands for what a step copied to pinned memory."""


class AsyncOutput:
    """As vLLM's: what it gives is there only when it is asked for."""

    def get_output(self):
        return SimpleNamespace(req_ids=["a"])


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def results_of(copies):
    return Pending(lambda: ("results", copies))


def test_an_output_that_is_not_there_yet_gives_results_and_then_lets_go():
    copies = Copies()
    alive = weakref.ref(copies)
    output = RunnerHooks._with_results(AsyncOutput(), results_of(copies))
    result = output.get_output()
    assert getattr(result, KEY) == ("results", copies)
    del output, result, copies
    # By the count of references alone: pinned memory is free for the next step's copy.
    assert alive() is None


def test_an_output_that_is_there_gives_results_at_once():
    output = SimpleNamespace(req_ids=["a"])
    assert RunnerHooks._with_results(output, results_of(1)) is output
    assert getattr(output, KEY) == ("results", 1)


def test_the_output_that_steps_without_requests_share_stays_as_it_is():
    shared = SimpleNamespace(req_ids=[])
    RunnerHooks._with_results(shared, results_of(1))
    assert not hasattr(shared, KEY)
