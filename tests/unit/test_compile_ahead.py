"""What is compiled ahead against what launches ask Triton for, over all steps."""

import os
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from eyesplice.fx_passes.custom_ops import schema_of  # noqa: E402
from eyesplice.fx_passes.custom_sites import CustomSite, CustomSites  # noqa: E402
from eyesplice.fx_passes.plan import SplicePlan  # noqa: E402
from eyesplice.fx_passes.sites import Site  # noqa: E402
from eyesplice.fx_passes.splice_pass import SPLICED, spliced_calls  # noqa: E402
from eyesplice.integration import compile_hook, session  # noqa: E402
from eyesplice.integration.buffers import Buffers, BufferSizes  # noqa: E402
from eyesplice.ops import (  # noqa: E402
    background,
    compile_ahead,
    contracts,
    launch,
    launch_custom,
    launch_graph,
)
from eyesplice.ops.site_tables import tables_of  # noqa: E402
from tests import user_ops  # noqa: E402, F401 - registers the ops
from tests.toy_graph import (  # noqa: E402
    HIDDEN,
    AddingLayer,
    FusedLayer,
    GemmaLayer,
    Model,
    Spliced,
)

ROOM = 64
KERNELS = (
    launch.boundary_kernel,
    launch.inline_kernel,
    launch_custom.custom_gain_kernel,
)
NAMES = ("boundary_", "inline_", "custom_gain")


@pytest.fixture(autouse=True)
def no_job():
    background.stop()
    background._jobs.clear()
    yield
    background.stop()
    background._jobs.clear()


@pytest.fixture
def asked(monkeypatch):
    """Keys of the forms that Triton was asked for: (ahead, when launched)."""
    keys = (set(), set())

    def note(key, fn, is_manual_warmup, **_):
        keys[not is_manual_warmup].add((fn.name, key))
        return True  # and compile nothing

    idle = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 7,
    )
    monkeypatch.setattr(driver, "_active", idle)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    # A device with few multiprocessors, so that few tokens show every launch.
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 4)
    monkeypatch.setattr(launch, "_starts_early", lambda: True)
    monkeypatch.setattr(launch, "EARLY_ROWS", 2)
    monkeypatch.setattr(launch, "block_of", lambda width: 4096)
    _forget()
    yield keys
    _forget()


def _forget():
    launch.choose_launch.cache_clear()
    compile_ahead._steps.cache_clear()
    for kernel in KERNELS:
        kernel.device_caches.clear()


class Launching(torch.fx.Interpreter):
    """Runs a spliced graph with the ops as they are on a GPU."""

    def call_function(self, target, args, kwargs):
        if target in SPLICED:
            return getattr(launch_graph, target._schema.name.partition("::")[2])(*args)
        return super().call_function(target, args, kwargs)


class Launched(Spliced):
    """A spliced model, its graph's inputs, and what they are for another step."""

    def _backend(self, module, inputs):
        super()._backend(module, inputs)
        self.launching = Launching(module)

        def run(*inputs):
            self.inputs = inputs
            return self.launching.run(*inputs)

        return run

    def step(self, tokens):
        ids = torch.arange(tokens) % 32
        inputs = [tokens if isinstance(x, int) else x for x in self.inputs]
        places = [i for i, x in enumerate(inputs) if _is_ids(x)]
        (place,) = places
        inputs[place] = ids
        self.launching.run(*inputs)


def _is_ids(value):
    return not isinstance(value, int) and value.dtype == torch.int64 and value.ndim == 1


def launched(model):
    torch._dynamo.reset()
    spliced = Launched(model)
    spliced(torch.arange(8))
    return spliced


def finish():
    """Wait until every job is done."""
    for key in list(background._jobs):
        future = background._jobs.pop(key, None)
        if future is not None:
            future.result()


def any_tables(model):
    return tables_of(next(iter(model.programs.values())))


def bending(layer, submodule):
    op = "userops::bend"
    site = Site(layer, submodule)
    return CustomSites((CustomSite(0, site, op, schema_of(op), "app", "app/w", 2),))


MODELS = {
    "fused": lambda: Model(FusedLayer),
    "gemma": lambda: Model(GemmaLayer),
    "in plain sight": lambda: Model(AddingLayer),
    "a user's op": lambda: Model(FusedLayer, custom=bending(0, "residual.mid")),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_compiled_ahead_is_what_steps_launch(asked, name):
    spliced = launched(MODELS[name]())
    ahead, at_launch = asked
    at_launch.clear()
    compile_ahead.queue(spliced_calls(spliced.graph), any_tables(spliced.model))
    background.start(None)
    finish()
    for tokens in range(1, ROOM + 1):
        spliced.step(tokens)
    assert ahead == at_launch
    kinds = {node.args[7:] for node in spliced.calls(contracts.boundary_)}
    launches = {launch.choose_launch(HIDDEN, n, ROOM) for n in range(1, ROOM + 1)}
    assert len(launches) == 4
    boundaries = sum(kernel == "boundary_kernel" for kernel, _ in ahead)
    assert boundaries >= 4 * len({bool(kind[0]) for kind in kinds})


def test_a_graph_on_a_cpu_compiles_nothing(asked):
    spliced = launched(Model(FusedLayer))
    before = threading.active_count()
    tables = any_tables(spliced.model)
    compile_ahead.compile_ahead(spliced_calls(spliced.graph), tables)
    assert not background.any_job() and threading.active_count() == before


def test_odd_calls_are_left_out(asked, caplog):
    """A stride that only a symbol tells; and no error reaches the caller."""
    spliced = launched(Model(FusedLayer))
    ((name, arguments), *_) = spliced_calls(spliced.graph)
    stream = SimpleNamespace(is_cuda=True)
    with caplog.at_level("DEBUG", logger="vllm.eyesplice"):
        calls = [(name, (stream, *arguments[1:]))]
        compile_ahead.compile_ahead(calls, any_tables(spliced.model))
    assert not background.any_job()
    symbol = (
        spliced.calls(contracts.boundary_)[0].args[0].meta["example_value"].shape[0]
    )
    assert compile_ahead._known([16, symbol]) == (16, None)


def test_a_job_that_runs_is_waited_for_and_one_that_waits_is_taken_back():
    begun, may_end, done = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        may_end.wait(30)
        done.append("slow")

    background.submit("slow", slow)
    background.start(None)
    assert begun.wait(30)
    background.submit("late", lambda: done.append("late"))
    background.submit("late", lambda: done.append("again"))
    background.settle("late")
    background.settle("unknown")
    assert not done
    threading.Timer(0.05, may_end.set).start()
    background.settle("slow")
    assert done == ["slow"]
    background.stop()
    assert done == ["slow"]


def test_launches_look_for_no_job_once_all_are_done():
    done = []
    for job in range(20):
        background.submit(job, lambda: done.append(1))
    background.start(None)
    for thread in list(background._threads):
        thread.join()
    assert len(done) == 20 and not background.any_job()
    background.submit(0, lambda: done.append(2))
    assert background.any_job()
    background.start(None)
    finish()
    assert done[-1] == 2


def test_threads_may_take_the_last_jobs_while_it_stops():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(150):
            for job in range(200):
                background.submit((turn, job), lambda: None)
            background.start(None)
            background.stop()
            assert not any(thread.is_alive() for thread in background._threads)
    finally:
        sys.setswitchinterval(usual)


def test_an_error_is_logged_for_those_who_look(caplog):
    def fails():
        raise RuntimeError("no such register")

    with caplog.at_level("DEBUG", logger="vllm.eyesplice"):
        background.submit("fails", fails)
        background.start(None)
        background.settle("fails")
        background.stop()
    (record,) = [r for r in caplog.records if r.name == "vllm.eyesplice"]
    assert record.levelname == "DEBUG" and "no such register" in caplog.text


def test_a_process_that_ends_finishes_what_runs_and_no_more():
    code = """
import time
from eyesplice.ops import background
for i in range(4000):
    background.submit(i, lambda: (time.sleep(0.5), print("done", flush=True)))
background.start(None)
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, timeout=60, check=True, capture_output=True, text=True
    )
    assert 1 <= run.stdout.count("done") <= background.MAX_THREADS


def test_a_kernel_goes_to_the_cache_directory_of_later_starts(monkeypatch):
    order = []
    open_one = SimpleNamespace(compile_ahead=lambda: order.append("compiled"))
    monkeypatch.setattr(session, "_current", open_one)
    compile_hook._initialize_cache(lambda manager: order.append("directory"), None)
    assert order == ["directory", "compiled"]


def test_a_session_does_not_keep_the_memory_of_an_engine_that_went(monkeypatch):
    compiled = []
    monkeypatch.setattr(session, "compile_ahead", lambda *given: compiled.append(given))
    plan = SplicePlan("layers", 1, frozenset({Site(0, "residual.pre")}))
    sizes = BufferSizes(tokens=8, requests=2, entries=1, bank_rows=2, width=4)
    buffers = Buffers.allocate(
        plan, sizes, dtype=torch.float32, device=torch.device("cpu")
    )
    tables = tables_of(buffers.program[0])
    opened = session.Session(None, plan, tables)
    opened.compile_ahead()
    assert compiled.pop() == ([], tables)
    bank = weakref.ref(buffers.bank)
    del buffers, tables
    assert bank() is None
    opened.compile_ahead()
    assert not compiled
