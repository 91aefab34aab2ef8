"""`custom_gain` against a loop over tokens in plain Python, kernel and reference."""

import dataclasses

import pytest
import torch

from eyesplice.ops import launch_custom, reference
from eyesplice.ops.inputs import Entry, guarded, pack_programs, poisoned
from eyesplice.ops.layout import Opcode, Stage
from eyesplice.ops.work import empty_work

ROWS = 6
ENTRIES = [
    Entry(Opcode.CUSTOM, Stage.STREAM, gain=0.5, counter=3, bit=2),
    Entry(Opcode.CUSTOM, Stage.BRANCH, gain=-3.0, clause_mask=4, counter=256, bit=1),
    Entry(Opcode.CUSTOM, Stage.NORMED, gain=1e30, clause_mask=-(2**31)),
    Entry(Opcode.CUSTOM, Stage.NORMED, gain=7.0, clause_mask=0, counter=1, bit=8),
]
PROGRAMS = [[entry] for entry in ENTRIES] + [[]]
SIZES = [0, 1, 63, 100, 127, 128, 129, 2000]


class World:
    """Tokens of mixed programs in poisoned maps; `device` decides who is asked."""

    def __init__(self, num_tokens, device, seed=0):
        generator = torch.Generator().manual_seed(seed)
        size = num_tokens + 5
        self.device, self.num_tokens = device, num_tokens
        self.rows, self.select, self.slot = (
            poisoned((size,), torch.int32, "cpu") for _ in range(3)
        )
        rows = torch.randint(ROWS, (num_tokens,), generator=generator)
        self.rows[:num_tokens] = rows
        self.select[:num_tokens] = torch.randint(
            -(2**31), 2**31, (num_tokens,), generator=generator
        )
        self.slot[:num_tokens] = rows
        self.program = pack_programs(PROGRAMS, 3)
        self.work = empty_work(size, ROWS, 1, 1, 4, torch.float32, device)
        self.work = self.work._replace(slot_of_token=self.slot.to(device))
        # A value is never looked at.
        self.value = poisoned((num_tokens, 4), torch.bfloat16, device)

    def ask(self, ops):
        maps = (self.rows, self.select, self.program)
        tables = [tensor.to(self.device) for tensor in maps]
        return ops.custom_gain(self.value, *tables, list(self.work)).cpu()

    def expected(self):
        """(gain, counts), one token after the other."""
        gain, counts = torch.zeros(self.num_tokens), torch.zeros(ROWS, 2, 256).int()
        for t in range(self.num_tokens):
            row = int(self.rows[t])
            if not 1 <= row <= len(ENTRIES):
                continue
            entry, bits = ENTRIES[row - 1], int(self.select[t]) & 0xFFFFFFFF
            acts = bits & entry.clause_mask & 0xFFFFFFFF != 0
            if acts:
                gain[t] = entry.gain
            if entry.counter:
                counts[row, 0, entry.counter - 1] += acts
                counts[row, 1, entry.counter - 1] += bits & entry.bit != 0
        return gain, counts


@pytest.fixture(params=["kernel", "reference"])
def ops(request):
    return launch_custom if request.param == "kernel" else reference


@pytest.mark.parametrize("num_tokens", SIZES)
def test_gains_and_counts(num_tokens, ops, device):
    world = World(num_tokens, device, seed=num_tokens)
    gain, counts = world.expected()
    found = world.ask(ops)
    assert found.dtype == torch.float32
    assert torch.equal(found, gain)
    assert torch.equal(world.work.counts.cpu(), counts)
    assert num_tokens < 60 or len(gain.unique()) == 4


def test_idle_tokens_have_no_gain_and_count_nothing(ops, device):
    world = World(300, device)
    world.rows[:300] = 0
    # The empty program's entries are poison here: nobody may look at them.
    world.program[0, 1:] = world.program[1, 1]
    assert not world.ask(ops).any()
    assert not world.work.counts.any()


def test_other_opcodes_have_no_gain(ops, device):
    world = World(50, device)
    add = dataclasses.replace(ENTRIES[0], opcode=Opcode.ADD)
    world.program = pack_programs([[add]] * 5, 3)
    assert not world.ask(ops).any()
    assert not world.work.counts.any()


def test_nothing_is_written_beside_the_counts(device):
    world = World(63, device)
    inside = guarded(world.work.counts)
    world.work = world.work._replace(counts=inside.tensor)
    world.ask(launch_custom)
    assert inside.intact()
    assert inside.tensor.any()


def test_maps_that_are_too_short_or_apart_are_refused(device):
    world = World(8, device)
    world.rows = world.rows[:7]
    with pytest.raises(ValueError, match="map entries"):
        world.ask(launch_custom)
    world = World(8, device)
    # On the device already: a copy of a tensor with gaps has none.
    world.select = world.select.to(device).repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match="select"):
        world.ask(launch_custom)
    world = World(8, device)
    world.program = world.program.to(device).repeat(1, 1, 2)[:, :, ::2]
    with pytest.raises(ValueError, match="program"):
        world.ask(launch_custom)
