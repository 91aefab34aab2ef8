"""A deferred add: the pair of boundaries around an MLP, against one formula for both."""

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import Entry, guarded, pack_programs, poisoned_work
from eyesplice.ops.layout import ALL_FAMILIES, Opcode, Stage

IMPLEMENTATIONS = {"kernel": launch.boundary_, "reference": reference.boundary_}
HIDDEN, TOKENS, EPS = 100, 63, 1e-5

# Row 1 touches h at the first boundary, row 2 its x, row 3 only its y, row 4 nothing of
# the first and the h of the second.
FIRST = [
    [Entry(Opcode.ADD, Stage.STREAM, 1, gain=0.7)],
    [Entry(Opcode.RANK1, Stage.BRANCH, 1, v=2, gain=-0.4)],
    [Entry(Opcode.ADD, Stage.NORMED, 2, gain=0.3)],
    [],
]
SECOND = [[], [], [], [Entry(Opcode.ADD, Stage.STREAM, 2, gain=-0.6)]]


class Pair:
    """Inputs of the two boundaries, in low precision."""

    def __init__(self, dtype, device):
        generator = torch.Generator().manual_seed(3)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        self.stream = normal(TOKENS, HIDDEN)
        self.attention = normal(TOKENS, HIDDEN)
        self.mlp = normal(TOKENS, HIDDEN)
        self.weights = 1 + 0.1 * normal(2, HIDDEN)
        self.bank = normal(3, HIDDEN)
        self.rows = (torch.arange(TOKENS) % 5).to(torch.int32).to(device)
        self.select = torch.full((TOKENS,), -1, dtype=torch.int32, device=device)
        self.work = list(poisoned_work(TOKENS, 5, HIDDEN, dtype, device))
        self.programs = [pack_programs(p, 2).to(device) for p in (FIRST, SECOND)]

    def tables(self, which):
        maps = self.rows, self.select
        return *maps, self.programs[which], self.bank, self.work, ALL_FAMILIES

    def expected(self):
        """(y of the first, h and y of the second) in float64."""
        bank = self.bank.double()
        row = self.rows.long()[:, None]
        x = self.attention.double()
        x = torch.where(row == 2, x - 0.4 * (x @ bank[2])[:, None] * bank[1], x)
        h = self.stream.double() + x
        h = torch.where(row == 1, h + 0.7 * bank[1], h)
        y = self.norm(h, 0)
        y = torch.where(row == 3, y + 0.3 * bank[2], y)
        last = h + self.mlp.double()
        last = torch.where(row == 4, last - 0.6 * bank[2], last)
        return y, last, self.norm(last, 1)

    def norm(self, h, which):
        mean_square = h.square().mean(dim=-1, keepdim=True)
        return h / (mean_square + EPS).sqrt() * self.weights[which].double()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pair_is_one_formula(name, dtype, device):
    boundary, pair = IMPLEMENTATIONS[name], Pair(dtype, device)
    stream, attention = guarded(pair.stream), guarded(pair.attention)
    before = pair.stream.clone(), pair.attention.clone()
    common = (pair.weights[0], 0.0, EPS)
    first = boundary(
        stream.tensor, attention.tensor, *common, *pair.tables(0), None, True
    )
    waits = ~torch.isin(pair.rows, torch.tensor([1, 2], device=device).int())
    assert torch.equal(stream.tensor[waits], before[0][waits])
    assert torch.equal(attention.tensor[waits], before[1][waits])
    assert not attention.tensor[~waits].any()
    mlp = pair.mlp.clone()
    second = boundary(
        stream.tensor,
        mlp,
        pair.weights[1],
        0.0,
        EPS,
        *pair.tables(1),
        attention.tensor,
        False,
    )
    assert stream.intact() and attention.intact()
    assert torch.equal(mlp, pair.mlp)
    y, h, last = pair.expected()
    # One rounding of the result; a token that could not wait has one more, of its h.
    unit = torch.finfo(dtype).eps
    for found, exact in ((first, y), (stream.tensor, h), (second, last)):
        scale = exact.abs().amax()
        assert (found.double() - exact).abs().amax() <= 2 * unit * scale + 2e-6 * scale


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_idle_pair_rounds_the_stream_once(name, device):
    boundary, pair = IMPLEMENTATIONS[name], Pair(torch.bfloat16, device)
    pair.rows.zero_()
    attention, mlp = pair.attention.float(), pair.mlp.float()
    once = (mlp + (attention + pair.stream.float())).bfloat16()
    stream = pair.stream.clone()
    common = (pair.weights[0], 0.0, EPS)
    boundary(stream, pair.attention, *common, *pair.tables(0), None, True)
    boundary(stream, pair.mlp, *common, *pair.tables(1), pair.attention, False)
    # The interpreter truncates to bf16 where a device rounds.
    if name == "reference" or device == "cuda":
        assert torch.equal(stream, once)
    else:
        unit = torch.finfo(torch.bfloat16).eps
        assert ((stream.float() - once.float()).abs() <= unit * once.abs()).all()
