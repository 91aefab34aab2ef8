"""A graph's call of an op: the op that torch knows, past the dispatcher on a GPU only."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from eyesplice.ops import contracts
from eyesplice.ops.inputs import Entry, pack_programs
from eyesplice.ops.layout import ALL_FAMILIES, Opcode, Stage
from eyesplice.ops.site_tables import SiteTables, open_tables
from eyesplice.ops.work import empty_work

WIDTH, TOKENS = 8, 5


class OnGpu:
    """As much of a CUDA tensor as the op looks at."""

    is_cuda = True


class Layer:
    """The tables of a boundary where each token gets the vector of ones."""

    def __init__(self):
        add = Entry(Opcode.ADD, Stage.STREAM, 1)
        self.program = pack_programs([[add]], 4)
        maps = torch.ones(2, TOKENS, dtype=torch.int32).unbind()
        work = list(empty_work(TOKENS, 2, 1, 1, WIDTH, torch.float32, "cpu"))
        site = SiteTables(*maps, torch.ones(2, WIDTH), work)
        open_tables(self, [(self.program, site)])

    def arguments(self):
        generator = torch.Generator().manual_seed(0)
        stream, branch = torch.randn(2, TOKENS, WIDTH, generator=generator)
        return {
            "stream": stream,
            "branch": branch,
            "weight": torch.ones(WIDTH),
            "weight_offset": 0.0,
            "eps": 1e-6,
            "program": self.program,
            "families": int(ALL_FAMILIES),
        }


def expected():
    """(normed, stream) of `Layer`, in plain PyTorch."""
    given = Layer().arguments()
    h = given["stream"] + given["branch"] + 1.0
    return torch.nn.functional.rms_norm(h, (WIDTH,), eps=1e-6), h


def test_any_way_of_calling_it_on_a_cpu_gives_the_same():
    layer = Layer()
    for by_keyword in (0, 2, 7):
        given = layer.arguments()
        names = list(given)
        front = names[: len(names) - by_keyword]
        named = {name: given[name] for name in names[len(front) :]}
        normed = contracts.boundary_(*(given[name] for name in front), **named)
        torch.testing.assert_close((normed, given["stream"]), expected())


def test_it_stays_the_op_that_torch_knows():
    for name in ("boundary_", "inline_", "custom_gain"):
        op = getattr(torch.ops.eyesplice, name).default
        assert op is getattr(contracts, name) is copy.deepcopy(op)
        assert isinstance(op, torch._ops.OpOverload)
        assert str(op) == f"eyesplice.{name}.default"


def test_it_is_traced_as_ever():
    layer = Layer()
    given = layer.arguments()

    def call(stream, branch, weight, program):
        return contracts.boundary_(
            stream, branch, weight, 0.0, 1e-6, program, given["families"]
        )

    tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
    traced = make_fx(call, tracing_mode="fake")(*tensors)
    assert contracts.boundary_ in [node.target for node in traced.graph.nodes]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(v) for v in list(given.values())[:3]]
        rest = (0.0, 1e-6, mode.from_tensor(layer.program), given["families"])
        assert contracts.boundary_(*fake, *rest).shape == (TOKENS, WIDTH)


@pytest.fixture
def launched(monkeypatch):
    """Calls of `boundary_` that reach the launcher, with a class for CUDA tensors."""
    calls = []
    monkeypatch.setattr(contracts, "Tensor", OnGpu)
    monkeypatch.setattr(
        contracts,
        "_launcher",
        lambda name: lambda *args, **named: calls.append((name, args, named)),
    )
    return calls


def test_on_a_gpu_the_launcher_is_called(launched):
    value = OnGpu()
    contracts.boundary_(value, 1, pending=None)
    assert launched == [("boundary_", (value, 1), {"pending": None})]


def test_a_profiler_and_a_mode_see_the_op(launched):
    value = OnGpu()
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="boundary_"):
        contracts.boundary_(value)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="boundary_"):
        contracts.boundary_(value)
    with pytest.raises(RuntimeError, match="boundary_"):
        contracts.boundary_(stream=value)
    assert launched == []
