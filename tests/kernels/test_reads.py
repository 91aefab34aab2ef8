"""Scores and captures against their formulas; values that are only read keep their bits."""

import dataclasses

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import Entry, pack_programs, random_case
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    ClauseKind,
    Comparison,
    Family,
    LogHead,
    Opcode,
    Score,
    Slot,
    Stage,
)
from eyesplice.ops.tolerances import ROUNDING, error_bound
from tests.kernels import ruler
from tests.kernels.world import ALL, Plan, Request, World

ON_GPU = torch.cuda.is_available()
IMPLEMENTATIONS = {"kernel": launch, "reference": reference}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [8, 90, 576, 4096, 8192] if ON_GPU else [8, 90, 576, 4096]
IN_SCALE, BIAS, THRESHOLD = 0.1, -0.2, 0.05


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def score_entry(score, **fields):
    # NORM names no row: row 0 is poison.
    common = {"in_scale": IN_SCALE, "bias": BIAS, "hi": THRESHOLD}
    common["v"] = 0 if score == Score.NORM else 3
    return Entry(Opcode.READ, Stage.STREAM, function=score, **(common | fields))


def exact_score(score, h, v):
    """(score, size of what it is computed from) in float64."""
    p = IN_SCALE * (h @ v) + BIAS
    spread = IN_SCALE * (h.abs() @ v.abs()) + abs(BIAS)
    length = h.norm(dim=1)
    match score:
        case Score.LINEAR:
            return p, spread
        case Score.SIGMOID:
            return 1 / (1 + torch.exp(-p)), spread
        case Score.RELU:
            return p * (p > 0), spread
        case Score.JUMP_RELU:
            near = (p - THRESHOLD).abs() < 1e-5 * spread
            return p * (p > THRESHOLD), torch.where(near, ruler.FREE, spread)
        case Score.NORM:
            return length, length
        case Score.DISTANCE:
            return (h - v).norm(dim=1), (h - v).norm(dim=1)
    relative = 0.0
    if score == Score.TANH_COSINE:
        relative = (h.abs() @ v.abs()) / (h @ v).abs()
        v = torch.tanh((h @ v / (v @ v))[:, None] * v)
    else:
        v = v.expand_as(h)
    lengths = length * v.norm(dim=1)
    cosine = (h * v).sum(dim=1) / lengths
    return cosine, (h * v).abs().sum(dim=1) / lengths + cosine.abs() + relative


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_scores(width, dtype, device):
    tokens = 63 if ON_GPU else 4
    case = random_case(tokens, width, dtype, device=device, num_programs=1, seed=31)
    entries = [score_entry(score, slot=score) for score in Score]
    case = dataclasses.replace(case, program=pack_programs([entries], 9).to(device))
    case.token_map[:tokens] = 1
    case.token_map[1] = 0
    found = {}
    for name, ops in IMPLEMENTATIONS.items():
        score = torch.full((tokens, len(Score)), -7.0, device=device)
        work = case.work._replace(score=score)
        value = case.stream.clone()
        tables = dataclasses.replace(case, work=work).tables
        ops.inline_(value, int(Stage.STREAM), *tables)
        assert same_bits(value, case.stream)
        assert (score[1] == -7.0).all()
        found[name] = score
    at = torch.arange(tokens, device=device) != 1
    h, v = case.stream[at].double(), case.bank[3, :width].double()
    for score in Score:
        exact, size = exact_score(score, h, v)
        low = found["reference"][at, score]
        bound = error_bound(exact, size, low, rounding=ROUNDING[torch.float32])
        error = (found["kernel"][at, score].double() - exact).abs()
        assert (error <= bound).all(), (score, error, bound)
        assert ((low.double() - exact).abs() <= 1e-5 * size).all(), score


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_edges_of_scores(name, device):
    """Zero vectors have the cosine 0; a small tanh keeps its digits; a NaN stays one."""
    kinds = [Score.COSINE, Score.TANH_COSINE, Score.RELU, Score.JUMP_RELU]
    entries = [score_entry(kind, v=1, slot=slot) for slot, kind in enumerate(kinds)]
    values = torch.tensor([[0.0, 0.0], [1e-4, 3e-4], [torch.nan, 1.0]])
    bank = torch.tensor([[torch.nan] * 2, [0.5, 2.0]])
    plan = Plan([entries], [ALL], [0] * 4)
    world = World(
        IMPLEMENTATIONS[name], device, {"a": Request(values, 3, plan)}, bank
    ).step(("a", 3))
    assert world.scores["a", 0][:2].tolist() == [0.0, 0.0]
    for kind, slot in ((Score.COSINE, 0), (Score.TANH_COSINE, 1)):
        exact, _ = exact_score(kind, values[1:2].double(), bank[1].double())
        assert abs(float(world.scores["a", 1][slot]) - float(exact)) < 1e-6
    assert world.scores["a", 2].isnan().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_read_sees_the_writes_before_it_and_its_condition(name, device):
    bank = torch.tensor([[torch.nan] * 2, [1.0, 0.0]])
    read = Entry(Opcode.READ, Stage.STREAM, v=1, clause_mask=2)
    plan = Plan(
        [
            [read, Entry(Opcode.ADD, Stage.STREAM, u=1, gain=2.0)],
            [dataclasses.replace(read, slot=1)],
        ],
        [ALL, (ClauseKind.RANGE, 1, 3, 0)],
        [0, 0],
    )
    values = torch.tensor([[5.0, 1.0], [6.0, 1.0], [7.0, 1.0], [8.0, 1.0]])
    world = World(
        IMPLEMENTATIONS[name], device, {"a": Request(values, 4, plan)}, bank
    ).step(("a", 4))
    scores = torch.stack([world.scores["a", i][:2] for i in range(4)])
    expected = torch.tensor([[torch.nan] * 2, [6, 8], [7, 9], [torch.nan] * 2])
    torch.testing.assert_close(scores, expected, equal_nan=True, rtol=0, atol=0)
    # Beyond the program's scores nothing is reset.
    assert world.scores["a", 0][2] == 1e6


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_captures(name, device):
    """Rows of two requests in any order, with what does not fit counted as lost."""
    generator = torch.Generator().manual_seed(2)
    bank = torch.full((2, 6), torch.nan).bfloat16()
    bank[1] = 1.0
    plan = Plan(
        [
            [Entry(Opcode.CAPTURE, Stage.STREAM, u=4, clause_mask=2)],
            [
                Entry(Opcode.ADD, Stage.STREAM, u=1),
                Entry(Opcode.CAPTURE, Stage.STREAM, u=7),
            ],
        ],
        [ALL, (ClauseKind.LAST, 0, 0, 0)],
    )
    requests = {
        key: Request(torch.randn(6, 6, generator=generator).bfloat16(), 3, plan)
        for key in "ab"
    }
    world = World(IMPLEMENTATIONS[name], device, requests, bank)
    world.step(("b", 2), ("a", 1), limit=3, start=1)
    head = world.work.capture_log[0].tolist()
    assert head[: len(LogHead)] == [3, 1, 3]
    wanted = {("b", 7, 0), ("b", 7, 1), ("a", 7, 0)}
    assert rows_of(world, 1, 4) == wanted
    assert world.work.capture[0].isnan().all() and world.work.capture[4:].isnan().all()
    world.step(("a", 3), ("b", 1), limit=4, start=5)
    assert world.work.capture_log[0].tolist()[: len(LogHead)] == [6, 5, 4]
    wanted = {("a", 4, 2), ("b", 4, 2), *[("a", 7, i) for i in (1, 2, 3)], ("b", 7, 2)}
    found = rows_of(world, 5, 9)
    assert found < wanted and len(found) == 4
    lost = world.work.slots[:, Slot.LOST].tolist()
    missing = [key for key, _, _ in wanted - found]
    assert lost == [0, missing.count("a"), missing.count("b"), 0, 0]


def rows_of(world, start, stop):
    """{(request, capture, position)} of these rows, whose content is checked."""
    found = set()
    for row in range(start, stop):
        slot, index, position = world.work.capture_log[1 + row].tolist()[:3]
        key = {world.slot(name): name for name in world.requests}[slot]
        value = world.requests[key].values[position]
        if index == 7:
            value = world.written[key, position]
        assert same_bits(world.work.capture[row].cpu(), value.contiguous())
        found.add((key, index, position))
    assert len(found) == stop - start
    return found


READING = [
    make
    for stage in Stage
    for make in (
        Entry(Opcode.READ, stage, v=1, slot=int(stage), counter=1, bit=1),
        Entry(Opcode.CAPTURE, stage, u=int(stage)),
        Entry(Opcode.COMPARE, stage, function=Comparison.LESS, slot=int(stage), bit=4),
        Entry(Opcode.LATCH, stage, u=4, bit=8),
        Entry(Opcode.LOGIC, stage, u=4, function=ClauseKind.NOR, bit=16),
        Entry(Opcode.NONE, stage),
    )
]


def reading_case(dtype, device, rows):
    case = random_case(12, 96, dtype, seed=33, device=device, num_programs=1)
    case.stream[3], case.branch[3] = -0.0, -0.0
    case.stream[4] = torch.nan
    case.token_map[:12] = torch.tensor(rows)
    work = case.work
    work.slot_of_token.fill_(1)
    work.slots.zero_()
    work.counts.zero_()
    work.carry.zero_()
    work.capture_log.zero_()
    work.capture_log[0, LogHead.LIMIT] = 5
    program = pack_programs([READING], len(READING)).to(device)
    return dataclasses.replace(case, program=program)


@pytest.mark.parametrize(
    ("branch", "defer"), [(True, False), (True, True), (False, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_boundary_that_is_only_read_is_idle(name, dtype, branch, defer, device):
    results = []
    for rows in ([0] * 12, [0, 1, 1] * 4):
        case = reading_case(dtype, device, rows)
        stream, x = case.stream.clone(), case.branch.clone() if branch else None
        pending = case.branch.clone() if branch and not defer else None
        normed = IMPLEMENTATIONS[name].boundary_(
            stream, x, case.weight, 0.0, 1e-5, *case.tables, pending, defer
        )
        results.append([stream, normed, *[x] * branch])
    for idle, read in zip(*results, strict=True):
        assert same_bits(idle, read)
    assert int(case.work.counts[1, 0, 0]) == 8 * (2 + branch)
    scores = case.work.score[:12, 1]
    assert scores.isnan().tolist() == [i % 3 == 0 or i == 4 for i in range(12)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_inline_value_that_is_only_read_is_idle(name, device):
    case = reading_case(torch.bfloat16, device, [1] * 12)
    case.stream.view(torch.int16)[5] = 0x7FA5
    for stage in Stage:
        value = case.stream.clone()
        IMPLEMENTATIONS[name].inline_(value, int(stage), *case.tables)
        assert same_bits(value, case.stream)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_gate_acts_in_its_own_launch(name, device):
    """Read x, gate on it, and write h and y where it holds."""
    gate = Entry(
        Opcode.COMPARE,
        Stage.BRANCH,
        function=Comparison.GREATER,
        lo=0.0,
        slot=2,
        bit=-(2**31),
    )
    writes = [
        Entry(Opcode.ADD, stage, u=1, clause_mask=-(2**31))
        for stage in (Stage.STREAM, Stage.NORMED)
    ]
    entries = [Entry(Opcode.READ, Stage.BRANCH, v=3, slot=2), gate, *writes]
    case = random_case(12, 96, torch.float32, seed=34, device=device, num_programs=1)
    case = dataclasses.replace(case, program=pack_programs([entries], 5).to(device))
    case.token_map[:12] = 1
    case.select[:12] = 5 | -(2**31)
    stream, branch = case.stream.clone(), case.branch.clone()
    args = (case.weight, 0.0, 1e-5, *case.tables)
    normed = IMPLEMENTATIONS[name].boundary_(stream, branch, *args)
    true = (case.branch.double() @ case.bank[3].double()) > 0
    assert 0 < int(true.sum()) < 12
    expected = torch.where(true, 5 | -(2**31), 5).int()
    assert torch.equal(case.select[:12], expected)
    u = case.bank[1] * true[:, None]
    h = case.stream + case.branch + u
    y = h * torch.rsqrt(h.square().mean(dim=1, keepdim=True) + 1e-5) * case.weight
    torch.testing.assert_close(stream, h)
    torch.testing.assert_close(normed, y + u)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("missing", [Family.READ, Family.GATE, Family.CAPTURE])
def test_a_family_left_out_leaves_the_others(missing, name, device):
    entries = [
        Entry(Opcode.READ, Stage.STREAM, v=1),
        Entry(Opcode.COMPARE, Stage.STREAM, function=Comparison.LESS, lo=1e9, bit=2),
        Entry(Opcode.CAPTURE, Stage.STREAM),
        Entry(Opcode.ADD, Stage.STREAM, u=1),
    ]
    bank = torch.tensor([[torch.nan] * 2, [1.0, 0.0]])
    requests = {"a": Request(torch.ones(2, 2), 2, Plan([entries], [ALL], [0]))}
    families = ALL_FAMILIES & ~missing
    world = World(IMPLEMENTATIONS[name], device, requests, bank, families)
    world.step(("a", 2))
    read, gate = missing != Family.READ, missing != Family.GATE
    assert world.written["a", 1].tolist() == [2.0, 1.0]
    assert (world.scores["a", 0][0] == 1.0) == read
    assert world.bit("a", 1) == [read and gate] * 2
    assert int(world.work.capture_log[0, 0]) == 2 * (missing != Family.CAPTURE)
