"""The order of a step's copies on streams that only note what they are told."""

from dataclasses import dataclass, field

import pytest
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.sites import Site
from eyesplice.integration import copies as module
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.copies import StepCopies

ROOM = 4


@dataclass(eq=False)
class Stream:
    name: str
    queue: list[object] = field(default_factory=list)


class Event:
    """What a stream or the host waits for is the recording that is the last by then."""

    made = 0

    def __init__(self, blocking=False):
        self.blocking = blocking
        self.recorded = None
        self.passed = False
        self.waited = 0
        Event.made += 1

    def record(self, stream):
        self.recorded = (stream.name, len(stream.queue))

    def wait(self, stream):
        assert self.recorded is not None
        stream.queue.append(("after", self.recorded))

    def query(self):
        assert self.recorded is not None
        return self.passed

    def synchronize(self):
        assert self.blocking and self.recorded is not None
        self.waited += 1


class Cuda:
    """The few names of `torch.cuda` that a copy needs."""

    Event, Stream = Event, Stream

    def __init__(self):
        self.main = self.current = Stream("main")
        self.fails = False

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream


class Words:
    """A range of words, on the device or on the host.

    A copy to the host is put on the stream that is current.
    """

    made = 0

    def __init__(self, cuda, words):
        self.cuda, self.words = cuda, words
        self.numel, self.numpy = words.numel, words.numpy

    def __getitem__(self, part):
        return Words(self.cuda, self.words[part])

    def copy_(self, other, *, non_blocking):
        assert non_blocking
        if self.cuda.fails:
            raise RuntimeError("out of memory")
        self.cuda.current.queue.append("copy")
        self.words.copy_(other.words)


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()

    def pinned(words):
        Words.made += 1
        return Words(fake, torch.full((words,), -1, dtype=torch.int32))

    monkeypatch.setattr(module.torch, "cuda", fake)
    monkeypatch.setattr(module, "_pinned", pinned)
    Event.made = Words.made = 0
    return fake


def buffers() -> Buffers:
    plan = SplicePlan("layers", 1, frozenset({Site(0, "residual.mid")}))
    sizes = BufferSizes(tokens=8, requests=ROOM, entries=1, bank_rows=1, width=4)
    cpu = torch.device("cpu")
    return Buffers.allocate(plan, sizes, dtype=torch.float32, device=cpu)


def on_a_stream(cuda, fails=False):
    side = Stream("side")
    copies = StepCopies(buffers(), side)
    copies._words = Words(cuda, copies._words)
    cuda.fails = fails
    return copies, side


def test_a_copy_follows_the_step_and_leaves_the_stream_as_it_was(cuda):
    copies, side = on_a_stream(cuda)
    for step in (1, 2):
        cuda.main.queue.append("step")
        found = copies.start(ROOM, 0, log=False)
        assert cuda.current is cuda.main
        assert cuda.main.queue == ["step"] * step
        assert side.queue == [
            entry for n in range(step) for entry in (("after", ("main", n + 1)), "copy")
        ]
        # It has arrived once the side stream has done all that was asked so far.
        assert found.done.recorded == ("side", 2 * step)
        found.wait()


@pytest.mark.parametrize("passed", [False, True])
def test_only_a_copy_that_has_not_arrived_is_waited_for(cuda, passed):
    copies, _ = on_a_stream(cuda)
    found = copies.start(ROOM, 0, log=False)
    found.done.passed = passed
    found.wait()
    assert found.done.waited == (not passed)


def test_the_stream_is_the_callers_again_when_a_copy_fails(cuda):
    copies, _ = on_a_stream(cuda, fails=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        copies.start(ROOM, 0, log=False)
    assert cuda.current is cuda.main


def test_an_event_is_used_again_only_after_its_release(cuda):
    copies, _ = on_a_stream(cuda)
    one, two = (copies.start(ROOM, 0, log=False) for _ in range(2))
    of_one = one.done
    assert of_one is not two.done and of_one.recorded != two.done.recorded
    one.wait()
    assert copies.start(ROOM, 0, log=False).done is not of_one
    one.release()
    one.release()
    again = copies.start(ROOM, 0, log=False)
    assert again.done is of_one
    assert copies.start(ROOM, 0, log=False).done is not of_one
    made = Event.made, Words.made
    for _ in range(5):
        again.release()
        again = copies.start(ROOM, 0, log=False)
    assert (Event.made, Words.made) == made


def test_pinned_memory_is_there_before_the_first_step(cuda):
    copies, _ = on_a_stream(cuda)
    made = Words.made
    found = [copies.start(ROOM, 0, log=False) for _ in range(3)]
    assert Words.made == made == 3
    # A fourth that is under way has to have some of its own.
    found.append(copies.start(ROOM, 0, log=False))
    assert Words.made == 4
    assert len({id(one.done) for one in found}) == 4


def test_what_has_arrived_stays_until_its_release(cuda):
    tables = buffers()
    copies = StepCopies(tables, Stream("side"))
    copies._words = Words(cuda, tables.words)
    found = []
    for number in range(5):
        tables.counts[3, 1, 5] = number
        found.append(copies.start(3, 0, log=False))
    assert [copy.counts[0, 1, 5] for copy in found] == [0, 1, 2, 3, 4]
    old = found[1].counts
    found[1].release()
    tables.counts[3, 1, 5] = 7
    assert copies.start(3, 0, log=False).counts[0, 1, 5] == 7
    assert old[0, 1, 5] == 7  # Void: whoever needs it has to take a copy.
    assert [found[n].counts[0, 1, 5] for n in (0, 2, 3, 4)] == [0, 2, 3, 4]


def test_each_step_has_its_own_words_whatever_part_of_them_it_copies():
    tables = buffers()
    copies = StepCopies(tables, None)
    found = []
    for number, (first_slot, tokens, log) in enumerate(
        [(3, 0, False), (3, 0, False), (1, 2, False), (3, 0, True), (1, 8, True)]
    ):
        tables.counts[3, 1, 5] = tables.slots[4, 0] = number
        tables.score[0, 1] = tables.capture_log[1, 0] = number
        found.append(copies.start(first_slot, tokens, log=log))
    for number, copy in enumerate(found):
        copy.wait()
        assert copy.counts[3 - copy.first_slot, 1, 5] == number
        assert copy.slots[4 - copy.first_slot, 0] == number
        assert len(copy.counts) == len(copy.slots) == ROOM + 1 - copy.first_slot
    assert [found[n].score[0, 1] for n in (2, 4)] == [2, 4]
    assert [found[n].score.shape for n in (2, 4)] == [(2, 32), (8, 32)]
    assert [found[n].log[1, 0] for n in (3, 4)] == [3, 4]
