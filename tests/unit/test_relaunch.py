"""Repeated launches against Triton's own: the same kernel, instances and arguments.

The driver is one that launches nothing and notes what it was asked to.
"""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from eyesplice.ops import launch_step  # noqa: E402
from eyesplice.ops.layout import (  # noqa: E402
    CLAUSE_WORDS,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    WORDS,
)
from eyesplice.ops.relaunch import Relaunch  # noqa: E402
from eyesplice.ops.work import empty_work  # noqa: E402


@triton.jit(do_not_specialize=["count"])
def kernel(p_out, pair, p_in, count, stride, BLOCK: tl.constexpr):
    o_t = tl.arange(0, BLOCK)
    b = tl.load(p_in + o_t * stride, mask=o_t < count, other=0)
    b += tl.load(pair[0] + o_t) + tl.load(pair[1] + o_t)
    tl.store(p_out + o_t, b)


class Driver:
    """Notes each launch: instances, the binary, and every argument."""

    def __init__(self) -> None:
        self.launches = []
        properties = {"max_shared_mem": 232448}
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, *_: (1, hash(binary), 32, 0, 1024),
            get_device_properties=lambda _: properties,
            unload_module=lambda *_: None,
        )

    def launcher_cls(self, source, metadata):
        def run(x, y, z, stream, function, packed, meta, enter, leave, *args):
            self.launches.append(((x, y, z, stream, function), args))

        return run

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 7


def _forget_kernels() -> None:
    for jit_function in (kernel, launch_step.route_kernel, launch_step.collect_kernel):
        jit_function.device_caches.clear()
    for relaunch in (launch_step._ROUTE, launch_step._COLLECT):
        relaunch._launched = None
    # A compiled kernel that goes asks the driver of its day to unload it.
    gc.collect()


@pytest.fixture
def device(monkeypatch):
    _forget_kernels()
    noting = Driver()
    monkeypatch.setattr(driver, "_active", noting)
    yield noting
    noting.launches.clear()
    _forget_kernels()


def same(one, other) -> bool:
    """Whether two arguments are one tensor's memory, equal numbers, or tuples of such."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return type(one) is type(other) and one == other


def assert_same(mine, by_triton) -> None:
    assert mine[0] == by_triton[0]
    assert same(mine[1], by_triton[1])


class Call:
    """The kernel above, its tensors and a `Relaunch` of it."""

    def __init__(self, noting: Driver) -> None:
        self.noting = noting
        self.relaunch = Relaunch(kernel, ("p_in", "count"))
        self.out = torch.zeros(64, dtype=torch.int32)
        self.pair = (torch.zeros(64, dtype=torch.int32), torch.ones(64))

    def parts(self, given, count, grid=3):
        return grid, (self.out, *self.pair), (given, count)

    def first(self, given, count) -> None:
        self.relaunch.launch(
            *self.parts(given, count),
            *(self.out, self.pair, given, count, given.stride(0)),
            BLOCK=32,
            num_warps=2,
        )

    def again(self, given, count, grid=3) -> bool:
        """Launch again if that is right; what was launched must be what Triton would."""
        before = len(self.noting.launches)
        if not self.relaunch.again(*self.parts(given, count, grid)):
            assert len(self.noting.launches) == before
            return False
        args = (self.out, self.pair, given, count, given.stride(0))
        kernel[(grid,)](*args, BLOCK=32, num_warps=2)
        mine, by_triton = self.noting.launches[before:]
        assert_same(mine, by_triton)
        return True


def test_values_may_change(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    assert not call.again(given, 5)
    call.first(given, 5)
    assert call.again(given, 5)
    for count in (0, 1, 16, -1, 2**31 - 1):
        assert call.again(given, count)
    assert call.again(given[64:], 5)
    assert call.again(torch.ones(4, dtype=torch.int32), 5)
    assert call.again(given, 5, grid=1)


def test_what_triton_compiles_anew_for_is_not_launched_again(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    others = [
        (given[1:], 5),
        (given.long(), 5),
        (given.float(), 5),
        (given[::2], 5),
        (given, 2**31),
    ]
    for other in others:
        call.first(given, 5)
        assert not call.again(*other)
        call.first(*other)
        strided = other[0].stride(0) != 1
        assert call.again(*other) is not strided
        assert not call.again(given, 5)


def test_other_tables_are_not_launched_again(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    call.first(given, 5)
    out, pair = call.out, call.pair
    call.out = out.clone()
    assert not call.again(given, 5)
    call.out, call.pair = out, (pair[0], pair[1].clone())
    assert not call.again(given, 5)
    call.pair = pair
    assert call.again(given, 5)


def test_nothing_outlives_the_tables(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    call.first(given, 5)
    held = [weakref.ref(tensor) for tensor in (call.out, *call.pair)]
    device.launches.clear()
    del call.out, call.pair
    assert [ref() for ref in held] == [None] * 3


class Steps:
    """The host's two ops at a step of two requests."""

    def __init__(self) -> None:
        self.maps = torch.zeros(2, 32, dtype=torch.int32)
        self.program = torch.zeros(2, 3, 4, WORDS, dtype=torch.int32)
        self.select = torch.zeros(32, dtype=torch.int32)
        self.work = list(empty_work(32, 3, 2, 4, 8, torch.float32, "cpu"))
        self.clauses = torch.zeros(3, MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
        self.ids = torch.zeros(3, MAX_TOKEN_IDS, dtype=torch.int32)
        self.sets = torch.zeros(1, 4, dtype=torch.int32)
        self.reads = torch.zeros(3, 8, dtype=torch.int32)

        self.lists = torch.zeros(4, 64, dtype=torch.int32)
        self.starts = torch.arange(8, dtype=torch.int32)
        self.positions = torch.arange(32)
        self.step_ids = torch.arange(32, dtype=torch.int32)

    def step(self, extent=4, requests=2):
        """Views of the lists that are new at each step, as a runner's are."""
        starts = self.starts[: requests + 1]
        lists = (self.lists[:], starts, self.positions[:extent])
        ids = self.step_ids[:extent]
        launch_step.route_(
            *(self.maps, self.program, self.select, self.work, *lists, ids),
            *(self.clauses, self.ids, self.sets, requests, extent, 1, 3),
        )
        launch_step.collect_(self.work, self.select, self.reads, *lists, requests)


def test_a_step_is_launched_again_as_it_is_at_first(device, monkeypatch):
    steps = Steps()
    steps.step()
    for options in ({}, {"extent": 32}, {"requests": 1}):
        device.launches.clear()
        with monkeypatch.context() as patch:
            for name in ("route_kernel", "collect_kernel", "check_rows", "work_of"):
                patch.setattr(launch_step, name, None)
            patch.setattr(Relaunch, "launch", None)
            steps.step(**options)
        again = list(device.launches)
        device.launches.clear()
        for relaunch in (launch_step._ROUTE, launch_step._COLLECT):
            relaunch._launched = None
        steps.step(**options)
        for mine, anew in zip(again, device.launches, strict=True):
            assert_same(mine, anew)


def test_more_tokens_than_there_are_maps_are_refused_at_every_step(device):
    steps = Steps()
    steps.step()
    with pytest.raises(ValueError, match="extent 33 is more than the 32 maps"):
        steps.step(extent=33)


def test_two_engines_take_turns(device):
    """What one engine's step launches is what it would launch alone."""
    one, two = Steps(), Steps()
    for steps in (one, two, two, one, one):
        device.launches.clear()
        steps.step()
        in_turn = list(device.launches)
        device.launches.clear()
        for relaunch in (launch_step._ROUTE, launch_step._COLLECT):
            relaunch._launched = None
        steps.step()
        for mine, anew in zip(in_turn, device.launches, strict=True):
            assert_same(mine, anew)


def test_another_layout_of_the_lists_is_not_launched_again(device):
    steps, names = Steps(), launch_step.route_kernel.arg_names
    stride = names.index("per_request_stride")
    steps.step()
    usual = steps.lists, steps.positions
    steps.lists = torch.zeros(4, 65, dtype=torch.int32)
    steps.step()
    assert [args[stride] for _, args in device.launches[::2]] == [64, 65]
    steps.lists, steps.positions = usual[0], torch.arange(64)[::2]
    with pytest.raises(ValueError, match="positions: rows must be contiguous"):
        steps.step()
    steps.positions = usual[1]
    steps.step()
    assert device.launches[-2][1][stride] == 64
