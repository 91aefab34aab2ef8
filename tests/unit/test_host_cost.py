"""What a step costs besides the forward pass: copies and launches, counted one by one."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import (
    Clause,
    Entry,
    FunctionInfo,
    Program,
    ScoreInfo,
)
from eyesplice.fx_passes.sites import Site
from eyesplice.integration import output_hook, scheduler_hook
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.results import Results
from eyesplice.integration.router import Router
from eyesplice.ops import contracts
from eyesplice.ops.layout import ClauseKind, Opcode, Scope, Stage

SITES = [Site(layer, "residual.mid") for layer in range(3)]
ROOM = 8


def program(digest, **more) -> Program:
    add = Entry(stage=Stage.STREAM, opcode=Opcode.ADD, u=1, clause_mask=1)
    tables = {site.table[0]: (add,) for site in SITES}
    return Program(digest, (Clause(ClauseKind.ALL),), tables, **more)


def reading(digest, scope) -> Program:
    info = FunctionInfo(
        name="p", kind="read", kernel="probe", layers=(0,), submodule="residual.mid"
    )
    scores = (ScoreInfo(0, 0, None, scope),)
    return program(digest, functions=(info,), scores=scores)


class Device(TorchDispatchMode):
    """Names every op on tensors that are not the host's, views excepted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in tensors) and not func.is_view:
            self.seen.append(func.overloadpacket.__name__)
        return out

    def launch(self, name: str, *_: object) -> None:
        self.seen.append(name)

    def taken(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


class World:
    """A router on a device that only counts."""

    def __init__(self, device: Device) -> None:
        plan = SplicePlan("layers", len(SITES), frozenset(SITES))
        sizes = BufferSizes(tokens=64, requests=ROOM, entries=4, bank_rows=2, width=8)
        buffers = Buffers.allocate(
            plan, sizes, dtype=torch.float32, device=torch.device("meta")
        )
        self.device = device
        self.results = Results(buffers, {"residual.mid": 8})
        self.router = Router(buffers, self.results)
        self.meta = torch.empty(64, dtype=torch.int64, device="meta")
        device.taken()

    def step(self, *ids: str) -> tuple[list[str], list[str]]:
        """What happens before the forward pass, and after it."""
        lengths = np.ones(len(ids), dtype=np.int32)
        self.router.step(list(ids), self.meta, self.meta, self.meta, len(ids), lengths)
        before, step = self.device.taken(), self.router.take_step()
        if step is not None:
            self.results.launch(step)
        return before, self.device.taken()


@pytest.fixture
def world(monkeypatch):
    with Device() as device:
        for name in ("route_", "collect_"):
            monkeypatch.setattr(contracts, name, partial(device.launch, name))
        yield World(device)


COPY_IN, COPY_OUT, WRITE = "_to_copy", "clone", "index_copy_"


def test_an_engine_that_is_idle_does_nothing(world: World):
    assert world.step("a", "b") == ([], [])
    world.router.end("a")
    assert world.step("b") == ([], [])


def test_a_step_of_the_same_requests_is_one_launch_and_no_copy_in(world: World):
    for number, name in enumerate("abc"):
        world.router.begin(name, program(f"p{number}"), 4)
    ids = ("a", "plain", "b", "c")
    assert world.step(*ids) == ([COPY_IN, WRITE, "route_"], [COPY_OUT])
    for _ in range(3):
        assert world.step(*ids) == (["route_"], [COPY_OUT])


def test_whatever_changes_arrives_in_one_copy(world: World):
    world.router.begin("a", program("p"), 4)
    world.step("a")
    # A request without a program moves the others: their table, and nothing else.
    assert world.step("plain", "a") == ([COPY_IN, "route_"], [COPY_OUT])
    # New programs in every table, and the state of three new requests.
    world.router.end("a")
    for number, name in enumerate("xyz"):
        world.router.begin(name, program(f"q{number}"), 4)
    assert world.step("x", "y", "z") == ([COPY_IN, WRITE, "route_"], [COPY_OUT])
    world.router.preempt("y")
    assert world.step("x", "z") == ([COPY_IN, "route_"], [COPY_OUT])
    world.router.resume("y")
    assert world.step("x", "z", "y")[0] == [COPY_IN, WRITE, "route_"]


def test_reads_add_a_launch_where_gates_look_back_and_no_copy(world: World):
    world.router.begin("a", reading("plain", Scope.NONE), 4)
    assert world.step("a")[1] == [COPY_OUT]
    world.router.begin("b", reading("mean", Scope.PROMPT), 4)
    assert world.step("a", "b")[1] == ["collect_", COPY_OUT]
    assert world.step("a", "b") == (["route_"], ["collect_", COPY_OUT])


def test_the_maps_are_cleared_once_when_the_last_program_has_gone(world: World):
    world.router.begin("a", program("p"), 4)
    world.step("a")
    world.router.end("a")
    assert world.step("b") == (["zero_", "zero_"], [])
    assert world.step("b") == ([], [])


def test_a_scheduler_and_a_front_end_without_programs_only_look(monkeypatch):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError(f"looked at {name}")

    outputs = [Untouchable()] * 3
    scheduler, runner_output = SimpleNamespace(), SimpleNamespace()
    result = scheduler_hook.update_from_output(
        lambda *_: "as it was", scheduler, Untouchable(), runner_output
    )
    assert result == "as it was" and not vars(scheduler)
    processor = Untouchable()
    result = output_hook._process_outputs(lambda *_: "as it was", processor, outputs)
    assert result == "as it was"
