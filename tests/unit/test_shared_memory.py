"""Two sides of a pair's memory in one process, by handles that need no device."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from eyesplice.benchmarks import shared_memory
from eyesplice.benchmarks.lending import borrowed
from eyesplice.benchmarks.shared_memory import Memory

LENT = {}
SIZE = 1 << 20


def lent(key):
    return LENT[key]


def refused(key):
    raise RuntimeError("no mapping here")


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The lender's side and the borrower's."""

    def handle(tensor):
        LENT[len(LENT)] = tensor
        return lent, (len(LENT) - 1,)

    monkeypatch.setattr(shared_memory, "handle", handle)
    monkeypatch.setattr(shared_memory, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(shared_memory, "_WAIT", 0.3)
    yield [Memory(tmp_path, lends=lends, rank=0) for lends in (True, False)]
    LENT.clear()


def model(value=1.0, size=4):
    made = nn.Linear(size, 2, dtype=torch.bfloat16)
    nn.init.constant_(made.weight, value)
    nn.init.zeros_(made.bias)
    made.register_buffer("angles", torch.arange(3.0))
    return made


def pointers(module):
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def test_weights_and_buffers_are_the_lenders(pair):
    mine, theirs = model(), model()
    lender, borrower = pair
    lender.weights(theirs)
    borrower.weights(mine)
    assert pointers(mine) == pointers(theirs)
    assert borrower.num_bytes == (8 + 2) * 2 + 3 * 4 and lender.num_bytes == 0
    assert isinstance(mine.weight, nn.Parameter)


def loaded(side, *, spare=0, size=SIZE):
    """A large and a small weight, with allocations in between that are not kept."""
    with side.loading():
        module = nn.Module()
        for _ in range(spare):
            torch.empty(SIZE)
        module.large = nn.Parameter(torch.empty(2, size, dtype=torch.bfloat16))
        module.small = nn.Parameter(torch.empty(8))
        module.last = nn.Parameter(torch.empty((size,), dtype=torch.float32))
    before = pointers(module)
    for number, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, number)
    side.weights(module)
    return module, before


@pytest.fixture
def here(monkeypatch):
    """This machine's memory is taken for a GPU's."""
    monkeypatch.setattr(shared_memory, "_DEVICES", ("cpu",))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("spare", [0, 2])
def test_a_borrower_loads_into_the_lenders_memory(pair, spare):
    lender, borrower = pair
    theirs, _ = loaded(lender, spare=spare)
    mine, allocated = loaded(borrower, spare=spare)
    large, small, last = pointers(theirs)
    assert allocated[0] == large and allocated[2] == last and allocated[1] != small
    assert pointers(mine) == [large, small, last]
    assert [p.flatten()[0].item() for p in theirs.parameters()] == [0, 1, 2]
    assert borrower.num_bytes == 4 * SIZE + 8 * 4 + 4 * SIZE


@pytest.mark.usefixtures("here")
def test_weights_of_other_sizes_are_not_loaded_into_the_lenders_memory(pair):
    lender, borrower = pair
    loaded(lender)
    with pytest.raises(ValueError, match="the weight large is not the lender's"):
        loaded(borrower, size=2 * SIZE)


@pytest.mark.usefixtures("here")
def test_a_borrower_that_may_not_map_loads_its_own(pair, monkeypatch):
    lender, borrower = pair
    monkeypatch.setattr(shared_memory, "handle", lambda tensor: (refused, (0,)))
    theirs, _ = loaded(lender)
    mine, before = loaded(borrower)
    assert pointers(mine) == before != pointers(theirs)
    assert borrower.failed == "no mapping here" and borrower.num_bytes == 0


def test_what_lies_elsewhere_is_allocated_as_ever(pair):
    with pair[1].loading():
        assert torch.empty(SIZE).device.type == "cpu"


_IN_A_NEW_PROCESS = """
import torch
from eyesplice.benchmarks import shared_memory
from eyesplice.benchmarks.shared_memory import Memory
shared_memory._DEVICES = ("meta",)
side = Memory({folder!r}, lends=True, rank=0)
with side.loading(), torch.device("meta"):
    assert torch.empty(1 << 20).is_meta
assert len(side._made) == 1
with side.cache():
    with torch.device("meta"):
        assert torch.zeros(4).is_meta
    side._lends = False
with torch.device("meta"):
    assert torch.empty(4).is_meta and torch.zeros(4).is_meta
assert not torch.empty(4).is_meta
"""


def test_the_first_device_of_a_process_is_kept(tmp_path):
    """torch looks its functions up when the first `with torch.device(...)` calls one."""
    script = _IN_A_NEW_PROCESS.format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_not_a_number_is_equal_to_itself(pair):
    lender, borrower = pair
    lender.weights(model(torch.nan))
    borrower.weights(model(torch.nan))


@pytest.mark.parametrize("other", [model(2.0), model(size=5), nn.Linear(4, 2)])
def test_another_models_weights_are_refused(pair, other):
    lender, borrower = pair
    lender.weights(model())
    with pytest.raises(ValueError, match=r"the weight weight is not|other weights"):
        borrower.weights(other)


def test_the_cache_is_the_lenders(pair, tmp_path):
    made = []
    for side in pair:
        with side.cache():
            made.append(
                (
                    torch.zeros(SIZE, dtype=torch.int8),
                    torch.zeros((2, SIZE), dtype=torch.int8),
                    torch.zeros(SIZE - 1, dtype=torch.int8),
                    torch.zeros(SIZE),
                )
            )
        side.note()
    (_, two, small, other), mine = made
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(*made, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    assert mine[1].shape == two.shape == (2, SIZE)
    assert small.numel() == SIZE - 1 and other.dtype == torch.float32
    assert borrowed(tmp_path) == {"0": {"bytes": 3 * SIZE, "failed": None}}
    assert torch.zeros(2, dtype=torch.int8).tolist() == [0, 0]


def test_a_cache_of_another_size_is_refused(pair):
    lender, borrower = pair
    with lender.cache():
        torch.zeros(SIZE, dtype=torch.int8)
    with pytest.raises(ValueError, match="a cache of"), borrower.cache():
        torch.zeros(2 * SIZE, dtype=torch.int8)
    assert torch.zeros(1).dtype == torch.float32


def test_where_nothing_can_be_mapped_each_keeps_its_own(pair, monkeypatch, tmp_path):
    lender, borrower = pair
    monkeypatch.setattr(shared_memory, "handle", lambda tensor: (refused, (0,)))
    mine = model()
    before = pointers(mine)
    lender.weights(model())
    borrower.weights(mine)
    assert pointers(mine) == before
    with borrower.cache():
        assert torch.zeros(SIZE, dtype=torch.int8).sum() == 0
    borrower.note()
    assert borrowed(tmp_path) == {"0": {"bytes": 0, "failed": "no mapping here"}}


def test_nobody_lends(pair):
    with pytest.raises(TimeoutError, match="nobody lent weights"):
        pair[1].weights(model())
