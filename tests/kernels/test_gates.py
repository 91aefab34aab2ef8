"""Gates against plain Python, however the same tokens are cut into steps."""

import math
from fractions import Fraction

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import Entry, pack_programs
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    ClauseKind,
    Comparison,
    Opcode,
    Reduce,
    Scope,
    Slot,
    Stage,
)
from eyesplice.ops.work import empty_work
from tests.kernels.world import ALL, Plan, Request, World

IMPLEMENTATIONS = {"kernel": launch, "reference": reference}
REDUCES = (Reduce.LAST, Reduce.MEAN, Reduce.MAX)
SCOPES = (Scope.PROMPT, Scope.GENERATED, Scope.REQUEST)
WIDTH = 4
UNIT = torch.tensor([1.0, 0, 0, 0])
BANK = torch.stack([torch.full((WIDTH,), torch.nan), UNIT])
NAN = math.nan

SCORES = {
    "a": [0.5, -1.25, NAN, 3.0, 0.3, -9.0, 0.1, 0.7, 0.2, 5.5, -0.1],
    "b": [NAN, 0.25, 0.25, -1e30, 2.0, 1e30, 1.0],
    "c": [1.0, 2.0, 3.0],
}
PROMPT_LEN = {"a": 5, "b": 1, "c": 2}
SCHEDULES = {
    "whole": [[("a", 11), ("b", 7), ("c", 3)]],
    "reversed": [[("c", 3), ("b", 7), ("a", 11)]],
    "chunks": [
        [("a", 3), ("b", 1)],
        [("c", 3), ("b", 4), ("a", 2)],
        [("b", 2), ("a", 6)],
    ],
    "one by one": [[("a", 1), ("b", 1), ("c", 1)]] * 3
    + [[("b", 1), ("a", 1)]] * 4
    + [[("a", 1)]] * 4,
}


def read(slot, mask=1):
    return Entry(Opcode.READ, Stage.STREAM, v=1, slot=slot, clause_mask=mask)


def compare(bit, slot, lo, comparison=Comparison.GREATER, reduce=0, scope=0):
    return Entry(
        Opcode.COMPARE,
        Stage.STREAM,
        u=reduce,
        v=scope,
        function=comparison,
        lo=lo,
        slot=slot,
        bit=1 << bit,
        clause_mask=0,
    )


def logic(kind, bit, mask):
    return Entry(
        Opcode.LOGIC, Stage.STREAM, u=mask, function=kind, bit=bit, clause_mask=0
    )


def latch(bit, mask):
    return Entry(Opcode.LATCH, Stage.STREAM, u=mask, bit=bit, clause_mask=0)


def run(name, device, plan, schedule, scores=None):
    scores = scores or SCORES
    requests = {}
    for request, numbers in scores.items():
        values = torch.zeros(len(numbers), WIDTH)
        values[:, 0] = torch.tensor(numbers)
        own = None if request == "c" else plan
        requests[request] = Request(values, PROMPT_LEN.get(request, 4), own)
    world = World(IMPLEMENTATIONS[name], device, requests, BANK)
    for spans in schedule:
        world.step(*spans)
    return world


def fixed(score):
    cut = min(max(Fraction(score), -Fraction(SCORE_LIMIT)), Fraction(SCORE_LIMIT))
    return Fraction(math.floor(cut * 2**SCORE_FRACTION_BITS + Fraction(1, 2)))


def reduction(name, position, reduce, scope):
    """The reduction at a token in exact numbers, or None where it has no value."""
    prompt_len = PROMPT_LEN[name]
    if scope == Scope.PROMPT and position < prompt_len - 1:
        return None
    scores = [
        float(torch.tensor(score))
        for p, score in enumerate(SCORES[name][: position + 1])
        if not math.isnan(score)
        and (scope != Scope.PROMPT or p < prompt_len)
        and (scope != Scope.GENERATED or p >= prompt_len)
    ]
    if not scores:
        return None
    if reduce == Reduce.MEAN:
        return sum(map(fixed, scores)) / len(scores) / 2**SCORE_FRACTION_BITS
    return max(scores) if reduce == Reduce.MAX else scores[-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_reductions(name, schedule, device):
    kinds = [(reduce, slot) for reduce in REDUCES for slot in range(len(SCOPES))]
    gates = [
        compare(8 + i, slot, 0.25, reduce=reduce, scope=SCOPES[slot])
        for i, (reduce, slot) in enumerate(kinds)
    ]
    plan = Plan([[read(slot) for slot in range(3)], gates], [ALL], SCOPES)
    world = run(name, device, plan, SCHEDULES[schedule])
    for request in "ab":
        for i, (reduce, slot) in enumerate(kinds):
            exact = [
                reduction(request, position, reduce, SCOPES[slot])
                for position in range(len(SCORES[request]))
            ]
            expected = [x is not None and x > 0.25 for x in exact]
            assert world.bit(request, 8 + i) == expected, (request, reduce, slot)
    assert {world.seen[key] for key in world.seen if key[0] == "c"} == {0}


@pytest.mark.parametrize("later", [False, True], ids=["same table", "later table"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_own_score(name, later, device):
    """A token of no score, by its condition or a NaN, is neither below nor above."""
    gates = [compare(28 + c, 2, 0.25, c) for c in Comparison]
    reads = [read(2, mask=2)]
    clauses = [ALL, (ClauseKind.RANGE, 1, 6, 0)]
    tables = [reads, gates] if later else [reads + gates]
    plan = Plan(tables, clauses, [Scope.NONE] * 3)
    world = run(name, device, plan, SCHEDULES["whole"])
    for request in "ab":
        scores = [
            score if 1 <= position < 6 else NAN
            for position, score in enumerate(SCORES[request])
        ]
        found = [world.bit(request, 28 + c) for c in Comparison]
        assert found[Comparison.LESS] == [x < 0.25 for x in scores]
        assert found[Comparison.LESS_EQUAL] == [x <= 0.25 for x in scores]
        assert found[Comparison.GREATER] == [x > 0.25 for x in scores]
        assert found[Comparison.GREATER_EQUAL] == [x >= 0.25 for x in scores]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_latches(name, schedule, device):
    plan = Plan(
        [[read(0), compare(30, 0, 2.5)], [latch(-(2**31), 1 << 30 | 2)]],
        [ALL, (ClauseKind.FALSE, 0, 0, 0)],
        [Scope.NONE],
        latches=-(2**31),
    )
    world = run(name, device, plan, SCHEDULES[schedule])
    for request in "ab":
        true = [score > 2.5 for score in SCORES[request]]
        expected = [any(true[: i + 1]) for i in range(len(true))]
        assert world.bit(request, 31) == expected
        assert world.bit(request, 30) == true


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_logic_sees_the_bits_set_before_it(name, device):
    """Bit 1 is the prompt; bits change within one table, bit 31 included."""
    both, either, neither = 1 << 20, 1 << 21, 1 << 22
    gates = [
        compare(31, 0, 0.25),
        logic(ClauseKind.AND, both, -(2**31) | 2),
        logic(ClauseKind.OR, either, -(2**31) | 2),
        logic(ClauseKind.NOR, neither, -(2**31) | 2),
        logic(ClauseKind.NOR, 1 << 23, both),
        logic(ClauseKind.AND, 1 << 31, neither),
    ]
    clauses = [ALL, (ClauseKind.PROMPT, 0, 0, 0)]
    plan = Plan([[read(0), *gates]], clauses, [Scope.NONE])
    world = run(name, device, plan, SCHEDULES["whole"])
    for request in "ab":
        prompt = [p < PROMPT_LEN[request] for p in range(len(SCORES[request]))]
        pairs = list(zip((x > 0.25 for x in SCORES[request]), prompt, strict=True))
        assert world.bit(request, 20) == [x and y for x, y in pairs]
        assert world.bit(request, 21) == [x or y for x, y in pairs]
        assert world.bit(request, 22) == [not (x or y) for x, y in pairs]
        assert world.bit(request, 23) == [not (x and y) for x, y in pairs]
        assert world.bit(request, 31) == [not (x or y) for x, y in pairs]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_mean_is_compared_exactly(name, device):
    """Numbers that cancel in any order, and a mean that no fp32 division gives."""
    scores = {"d": [0.1, 2.0**21, 0.7, -(2.0**21), 0.1, -0.9, 3.0, -2.0, 2.0, 0.0]}
    exact = sum(fixed(float(torch.tensor(x))) for x in scores["d"])
    bound = float(exact / 10 / 2**SCORE_FRACTION_BITS)
    at = torch.tensor(bound)
    below = torch.nextafter(at, torch.tensor(-10.0))
    gates = [
        compare(10 + c, 0, float(lo), c, Reduce.MEAN, Scope.REQUEST)
        for c, lo in enumerate([at, at, below, below])
    ]
    plan = Plan([[read(0)], gates], [ALL], [Scope.REQUEST])
    found = set()
    for schedule in ([[("d", 10)]], [[("d", 4)], [("d", 6)]], [[("d", 1)]] * 10):
        world = run(name, device, plan, schedule, scores)
        found.add(tuple(world.bit("d", 10 + c)[-1] for c in range(4)))
    mean = exact / 10 / 2**SCORE_FRACTION_BITS
    assert found == {
        (mean < Fraction(float(at)), mean <= Fraction(float(at)), True, True)
    }


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_many_tokens_of_one_request(name, device):
    """More than a block of them, of which a few are looked at."""
    count, looked_at = 700, [0, 255, 256, 511, 699]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(count, generator=generator)
    scores[::7] = torch.nan
    gates = [
        compare(9, 1, 0.02, reduce=Reduce.MEAN, scope=Scope.REQUEST),
        compare(10, 1, 2.5, reduce=Reduce.MAX, scope=Scope.GENERATED),
        compare(11, 1, 0.0, reduce=Reduce.LAST, scope=Scope.REQUEST),
        latch(1 << 12, 1 << 3),
    ]
    work = empty_work(count, 3, 2, 1, WIDTH, torch.float32, device)
    work.score[:, 1] = scores.to(device)
    work.slot_of_token.fill_(2)
    work.slots[2, Slot.PROMPT_LEN] = 100
    rows, select = torch.zeros(2, count, dtype=torch.int32, device=device)
    rows[looked_at] = 1
    select[300] = 1 << 3
    program = pack_programs([gates], 4).to(device)
    IMPLEMENTATIONS[name].inline_(
        torch.zeros(count, WIDTH, device=device),
        int(Stage.STREAM),
        rows,
        select,
        program,
        BANK.to(device),
        list(work),
        int(ALL_FAMILIES),
    )
    numbers = scores.double().tolist()
    for token in looked_at:
        before = [x for x in numbers[: token + 1] if x == x]
        generated = [x for x in numbers[100 : token + 1] if x == x]
        mean = Fraction(sum(map(fixed, before)), max(len(before), 1))
        expected = [
            mean > Fraction(float(torch.tensor(0.02))) * 2**SCORE_FRACTION_BITS,
            max(generated, default=0.0) > 2.5,
            bool(before) and before[-1] > 0.0,
            token >= 300,
        ]
        found = [bool(int(select[token]) >> bit & 1) for bit in range(9, 13)]
        assert found == expected, token
