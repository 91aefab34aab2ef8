"""The reference against formulas of its own tests, in float64 and plain Python."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eyesplice.ops import contracts, reference
from eyesplice.ops.inputs import Entry, pack_programs
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    CLAUSE_WORDS,
    INT32_MAX,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
    Function,
    Opcode,
    Stage,
)
from eyesplice.ops.site_tables import SiteTables, open_tables
from eyesplice.ops.work import empty_work

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HIDDEN = 24
EPS = 1e-5


@pytest.fixture
def normal():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw


def tables(entries, rows, select=None, width=HIDDEN, dtype=torch.float32):
    """(token_map, select, program, bank, work, families); bank rows 1 to 3."""
    bank = torch.zeros(4, width, dtype=dtype)
    bank[1:] = torch.linspace(-1, 1, 3 * width).view(3, width).sin()
    return (
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(select or [-1] * len(rows), dtype=torch.int32),
        pack_programs([entries], len(entries) + 1),
        bank,
        list(empty_work(len(rows), 2, 1, 1, width, dtype, "cpu")),
        ALL_FAMILIES,
    )


class Owner:
    """Whatever holds tables."""


def open_tables_of(maps):
    """(owner, program, families) of tables that the ops of a graph can find."""
    token_map, select, program, bank, work, families = maps
    owner = Owner()
    open_tables(owner, [(program, SiteTables(token_map, select, bank, work))])
    return owner, program, int(families)


def rms_norm(h, weight):
    mean_square = (h * h).sum(dim=-1, keepdim=True) / h.shape[-1]
    return h / torch.sqrt(mean_square + EPS) * weight


def close(result, exact, dtype=torch.float32):
    bound = TOLERANCE[dtype]
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_branch", [True, False])
def test_idle_boundary(has_branch, offset, dtype, normal):
    stream, weight = normal(5, HIDDEN, dtype=dtype), normal(HIDDEN, dtype=dtype)
    branch = normal(5, HIDDEN, dtype=dtype) if has_branch else None
    h = stream.double() + (branch.double() if has_branch else 0)
    y = reference.boundary_(
        stream, branch, weight, offset, EPS, *tables([], [0] * 5, dtype=dtype)
    )
    close(stream, h, dtype)
    close(y, rms_norm(h, weight.double() + offset), dtype)


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_addition_acts_on_its_stage(dtype, stage, normal):
    stream, branch = normal(4, HIDDEN, dtype=dtype), normal(4, HIDDEN, dtype=dtype)
    weight = normal(HIDDEN)
    maps = tables([Entry(Opcode.ADD, stage, 2, gain=1.5)], [0, 1, 0, 1], dtype=dtype)
    change = torch.zeros(4, HIDDEN, dtype=torch.float64)
    change[1::2] = 1.5 * maps[3][2].double()
    h = stream.double() + branch.double() + change * (stage != Stage.NORMED)
    exact = rms_norm(h, weight.double()) + change * (stage == Stage.NORMED)
    y = reference.boundary_(stream, branch, weight, 0.0, EPS, *maps)
    close(stream, h, dtype)
    close(y, exact, dtype)


@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_the_stream_is_written(dtype, has_branch, normal):
    branch = normal(3, HIDDEN, dtype=dtype) if has_branch else None
    weight = normal(HIDDEN, dtype=dtype)
    entries = [Entry(Opcode.ADD, stage, 1) for stage in Stage]
    maps = tables(entries, [1, 1, 1], dtype=dtype)
    read = [tensor for tensor in (branch, weight, *maps[:4]) if tensor is not None]
    before = [tensor.clone() for tensor in read]
    reference.boundary_(normal(3, HIDDEN, dtype=dtype), branch, weight, 0.0, EPS, *maps)
    for tensor, copy in zip(read, before, strict=True):
        assert torch.equal(tensor, copy)


FUNCTIONS = {
    Function.IDENTITY: lambda p: p,
    Function.RELU: lambda p: max(p, 0.0),
    Function.SIGMOID: lambda p: 1 / (1 + math.exp(-p)),
    Function.STEP: lambda p: float(p >= 0),
    Function.CLIP: lambda p: min(max(p, -0.4), 0.3),
    Function.TOWARD_CLIP: lambda p: min(max(p, -0.4), 0.3) - p,
    Function.TOWARD_VALUE: lambda p: -0.4 - (p if p > 0.3 else 0.0),
}


@pytest.mark.parametrize("function", Function)
def test_rank_one(function, normal):
    entry = Entry(
        Opcode.RANK1,
        Stage.STREAM,
        u=1,
        v=3,
        function=function,
        gain=-0.7,
        in_scale=0.5,
        bias=0.1,
        lo=-0.4,
        hi=0.3,
    )
    value = normal(40, HIDDEN)
    maps = tables([entry], [1] * 40)
    u, v = maps[3][1].double(), maps[3][3].double()
    exact = value.double().clone()
    for row in exact:
        row += -0.7 * FUNCTIONS[function](0.5 * float(v @ row) + 0.1) * u
    reference.inline_(value, Stage.STREAM, *maps)
    close(value, exact)


def test_ablation_leaves_nothing_along_the_direction(normal):
    value = normal(6, HIDDEN)
    maps = tables([], [1] * 6)
    norm = float(maps[3][2].double().norm())
    entry = Entry(Opcode.RANK1, Stage.BRANCH, 2, 2, gain=-1.0, in_scale=norm**-2)
    reference.inline_(value, Stage.BRANCH, *tables([entry], [1] * 6))
    assert (value @ maps[3][2]).abs().max() < 1e-5


def test_entries_run_in_order(normal):
    value = normal(1, HIDDEN)
    add = Entry(Opcode.ADD, Stage.STREAM, 1)
    double = Entry(Opcode.RANK1, Stage.STREAM, 2, 1, in_scale=0.1)
    maps = tables([add, double], [1])
    u, w = maps[3][1].double(), maps[3][2].double()
    h = value[0].double() + u
    exact = h + 0.1 * (u @ h) * w
    reference.inline_(value, Stage.STREAM, *maps)
    close(value[0], exact)


def test_an_entry_needs_one_true_clause_of_its_mask(normal):
    value = normal(4, HIDDEN)
    entry = Entry(Opcode.ADD, Stage.STREAM, 1, clause_mask=0b101 - 2**31)
    select = [0b010, 0b110, -(2**31), 0]
    exact = value.double()
    maps = tables([entry], [1] * 4, select)
    exact[[1, 2]] += maps[3][1].double()
    reference.inline_(value, Stage.STREAM, *maps)
    close(value, exact)


@pytest.mark.parametrize("stage", [Stage.BRANCH, Stage.NORMED])
def test_inline_leaves_other_stages_and_idle_tokens_alone(stage, normal):
    value = normal(3, HIDDEN, dtype=torch.bfloat16)
    value[0] = -0.0
    before = value.clone()
    maps = tables([Entry(Opcode.ADD, Stage.STREAM, 1)], [0, 1, 1], dtype=value.dtype)
    reference.inline_(value, stage, *maps)
    assert torch.equal(value.view(torch.int16), before.view(torch.int16))


def test_a_bank_wider_than_the_value(normal):
    value = normal(2, 8)
    exact = value.double()
    maps = tables([Entry(Opcode.ADD, Stage.BRANCH, 3)], [1, 1])
    reference.inline_(value, Stage.BRANCH, *maps)
    close(value, exact + maps[3][3, :8].double())


def route(requests, clauses, extent):
    """The maps after a step; requests are (row, prompt_len, first position, tokens)."""
    table = torch.zeros(2, MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
    for j, clause in clauses.items():
        table[1, j] = torch.tensor(clause)
    program = pack_programs([[Entry(Opcode.MASK, Stage.STREAM)]], 1)[None]
    counts = torch.tensor([0, *(request[3] for request in requests)])
    positions = [first + i for _, _, first, count in requests for i in range(count)]
    maps = torch.full((2, extent + 2), 99, dtype=torch.int32)
    per_request = torch.zeros(4, len(requests), dtype=torch.int32)
    for i, (row, prompt_len, _, _) in enumerate(requests):
        per_request[:, i] = torch.tensor([row, prompt_len, i + 1, 0])
    reference.route_(
        maps[:1],
        program,
        maps[1],
        list(empty_work(extent + 2, len(requests) + 1, 1, 1, 8, torch.float32, "cpu")),
        per_request,
        counts.cumsum(0).int(),
        torch.tensor(positions, dtype=torch.int64),
        torch.zeros(len(positions), dtype=torch.int32),
        table,
        torch.zeros(2, MAX_TOKEN_IDS, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        len(requests),
        extent,
        0,
        0,
    )
    assert maps[:, extent:].eq(99).all()
    return maps[0, :extent].tolist(), maps[1, :extent].tolist()


FROM_END = RANGE_START_FROM_PROMPT_END
TO_END = RANGE_STOP_FROM_PROMPT_END


@pytest.mark.parametrize(
    ("clause", "true_at"),
    [
        ((ClauseKind.FALSE, 0, 0, 0), []),
        ((ClauseKind.ALL, 0, 0, 0), [0, 1, 2, 3, 4, 5, 6]),
        ((ClauseKind.PROMPT, 0, 0, 0), [0, 1, 2, 3]),
        ((ClauseKind.GENERATED, 0, 0, 0), [4, 5, 6]),
        ((ClauseKind.LAST, 0, 0, 0), [3]),
        ((ClauseKind.RANGE, 1, 3, 0), [1, 2]),
        ((ClauseKind.RANGE, -2, 0, FROM_END | TO_END), [2, 3]),
        ((ClauseKind.RANGE, 2, -1, TO_END), [2]),
        ((ClauseKind.RANGE, -1, INT32_MAX, FROM_END), [3, 4, 5, 6]),
        ((ClauseKind.RANGE, 5, INT32_MAX, TO_END), [5, 6]),
    ],
)
@pytest.mark.parametrize("bit", [0, 31])
def test_clauses(bit, clause, true_at):
    rows, select = route([(1, 4, 0, 7)], {bit: clause}, 7)
    assert rows == [1] * 7
    assert [i for i, bits in enumerate(select) if (bits >> bit) & 1] == true_at
    assert {bits & ~(1 << bit) for bits in select} <= {0, -(2**32)}


@pytest.mark.parametrize(
    ("kind", "mask", "true_at"),
    [
        (ClauseKind.AND, 0b11, [2]),
        (ClauseKind.OR, 0b11, [0, 1, 2, 3]),
        (ClauseKind.NOR, 0b11, [4]),
        (ClauseKind.AND, 0, [0, 1, 2, 3, 4]),
    ],
)
def test_clauses_of_clauses(kind, mask, true_at):
    """Bit 0: position < 3; bit 1: position 2 and 3."""
    clauses = {
        0: (ClauseKind.RANGE, 0, 3, 0),
        1: (ClauseKind.RANGE, 2, 4, 0),
        5: (kind, mask, 0, 0),
    }
    _, select = route([(1, 9, 0, 5)], clauses, 5)
    assert [i for i, bits in enumerate(select) if bits & 32] == true_at


def test_route_maps_requests_and_clears_the_rest():
    requests = [(1, 2, 1, 2), (0, 3, 0, 1), (1, 5, 4, 1)]
    clauses = {0: (ClauseKind.GENERATED, 0, 0, 0), 1: (ClauseKind.LAST, 0, 0, 0)}
    rows, select = route(requests, clauses, 6)
    assert rows == [1, 1, 0, 1, 0, 0]
    assert select == [2, 1, 0, 2, 0, 0]


def test_route_without_requests():
    assert route([], {}, 3) == ([0, 0, 0], [0, 0, 0])


def test_a_graph_sees_only_what_it_reads_as_written():
    written = {
        name: [
            argument.name
            for argument in getattr(torch.ops.eyesplice, name).default._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for name in ("boundary_", "inline_", "route_", "collect_", "anchor")
    }
    assert written == {
        "boundary_": ["stream", "branch"],
        "inline_": ["value"],
        "route_": ["token_map", "select"],
        "collect_": [],
        "anchor": [],
    }


def test_the_registered_ops_are_the_reference(normal):
    stream, branch, weight = (normal(*shape) for shape in ((3, 24), (3, 24), (24,)))
    maps = tables([Entry(Opcode.ADD, Stage.STREAM, 1)], [0, 1, 1])
    copies = [(stream.clone(), branch.clone()) for _ in range(2)]
    owner, program, families = open_tables_of(maps)
    found = [
        reference.boundary_(*copies[0], weight, 0.0, EPS, *maps, None, True),
        contracts.boundary_(
            *copies[1], weight, 0.0, EPS, program, families, None, True
        ),
    ]
    assert torch.equal(*found)
    for one, other in zip(*copies, strict=True):
        assert torch.equal(one, other)
    other = stream.clone()
    contracts.inline_(stream, 1, program, families)
    reference.inline_(other, 1, *maps)
    assert torch.equal(stream, other)
    gains = contracts.custom_gain(stream, program)
    assert torch.equal(gains, reference.custom_gain(stream, *maps[:3], maps[4]))
    del owner
    with pytest.raises(ValueError, match="belongs to no engine of this process"):
        contracts.inline_(stream, 1, program, families)


def test_fakes_give_shapes():
    with FakeTensorMode() as mode:
        args = [torch.empty(5, 24, dtype=torch.bfloat16) for _ in range(2)]
        program = mode.from_tensor(tables([], [0] * 5)[2])
        y = contracts.boundary_(*args, torch.empty(24), 0.0, EPS, program, 1)
        contracts.inline_(args[0], 0, program, 1)
    assert (y.shape, y.dtype) == ((5, 24), torch.bfloat16)
