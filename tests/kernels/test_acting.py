"""Tokens that are idle because nothing can act on them leave no trace by that."""

import random

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import Entry
from eyesplice.ops.layout import (
    INT32_MAX,
    ClauseKind,
    Comparison,
    Opcode,
    Reduce,
    Scope,
    Score,
    Stage,
)
from tests.kernels.world import Plan, Request, World

WIDTH = 4
BANK = torch.tensor([[torch.nan] * 4, [1.0, 0, 0, 0], [0, 0.5, 0, -0.25]])
CLAUSES = [
    (ClauseKind.LAST, 0, 0, 0),
    (ClauseKind.GENERATED, 0, 0, 0),
    (ClauseKind.RANGE, 1, 3, 0),
    (ClauseKind.AFTER, 1 << 2, 0, 0),
    (ClauseKind.TOKEN_LIST, 0, 2, 0),
    (ClauseKind.RANGE, 7, INT32_MAX, 0),
    (ClauseKind.PROMPT, 0, 0, 0),
    (ClauseKind.OR, 1 << 0 | 1 << 4, 0, 0),
]
GATES = (8, 9, 10, 11, 12, 31)
SCORES = 3
CAPTURE_ROWS = 128
"""More than a step can ask for: which of its rows are lost would be by chance."""

STEPS = ([("a", 5), ("b", 2), ("c", 1)], [("b", 3), ("a", 1), ("c", 3)], [("a", 3)])


def bit(number):
    return -(2**31) if number == 31 else 1 << number


def random_mask(rng, numbers, most=2):
    chosen = rng.sample(numbers, rng.randint(1, most))
    return sum(bit(number) for number in chosen)


def random_entry(rng):
    """Of any kind; a gate may set a clause, and be asked for before it has run."""
    clauses, every = range(len(CLAUSES)), (*range(len(CLAUSES)), *GATES)
    own = rng.choice(GATES) if rng.random() < 0.9 else rng.choice(clauses)
    kind = rng.choice(("read", "read", "write", "write", "capture", "compare", "logic"))
    acts = {"clause_mask": random_mask(rng, every)}
    if rng.random() < 0.3:
        acts |= {"counter": rng.randint(1, 5), "bit": random_mask(rng, clauses, 1)}
    match kind:
        case "read":
            fields = {"v": 1, "slot": rng.randrange(SCORES), "function": Score.LINEAR}
            return Entry(Opcode.READ, Stage.STREAM, **fields, **acts)
        case "write":
            return Entry(Opcode.ADD, Stage.STREAM, u=2, gain=rng.random(), **acts)
        case "capture":
            return Entry(Opcode.CAPTURE, Stage.STREAM, u=rng.randrange(3), **acts)
        case "compare":
            reduce = rng.choice((0, 0, 0, 0, *Reduce))
            fields = {
                "u": reduce,
                "v": rng.choice([s for s in Scope if s]) if reduce else 0,
                "function": rng.choice(list(Comparison)),
                "lo": rng.choice((-0.5, 0.0, 0.5)),
                "slot": rng.randrange(SCORES),
            }
            opcode = Opcode.COMPARE
        case _:
            opcode = rng.choice((Opcode.LOGIC,) * 4 + (Opcode.LATCH,))
            kinds = (ClauseKind.AND,) * 3 + (ClauseKind.OR,) * 2 + (ClauseKind.NOR,)
            fields = {"function": rng.choice(kinds), "u": random_mask(rng, every, 3)}
    return Entry(opcode, Stage.STREAM, bit=bit(own), **fields, clause_mask=0)


def random_plan(rng):
    tables = [[random_entry(rng) for _ in range(rng.randint(1, 4))] for _ in range(3)]
    scopes = [rng.choice(list(Scope)) for _ in range(SCORES)]
    latches = random_mask(rng, GATES)
    return Plan(tables, CLAUSES, scopes, latches, [7, 9])


def run(ops, device, seed, may_idle):
    rng = random.Random(seed)
    plans = [random_plan(rng), random_plan(rng)]
    generator = torch.Generator().manual_seed(seed)
    requests = {
        name: Request(
            torch.randn(9, WIDTH, generator=generator),
            prompt_len,
            plan,
            [rng.choice((3, 7, 9)) for _ in range(9)],
        )
        for name, prompt_len, plan in zip("abc", (4, 3, 2), (*plans, None), strict=True)
    }
    world = World(
        ops, device, requests, BANK, may_idle=may_idle, capture_rows=CAPTURE_ROWS
    )
    world.work.counts.zero_()
    captured = []
    for spans in STEPS:
        world.step(*spans)
        captured.append(world.captured())
    return world, captured


@pytest.mark.parametrize(
    ("ops", "seeds"), [(reference, range(150)), (launch, range(1000, 1004))]
)
def test_what_is_skipped_would_have_done_nothing(ops, seeds, device):
    """The judge is the program run at every token of its request."""
    idle = looked_at = rows = 0
    for seed in seeds:
        (skipping, found), (every, expected) = (
            run(ops, device, seed, may_idle) for may_idle in (True, False)
        )
        assert found == expected, seed
        rows += sum(map(len, expected))
        assert skipping.seen == every.seen, seed
        for key in every.seen:
            for name in ("scores", "written"):
                pair = (getattr(world, name)[key] for world in (skipping, every))
                torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
            pairs = list(zip(skipping.words[key], every.words[key], strict=True))
            assert all(word in (0, of_all) for word, of_all in pairs)
            idle += sum(word != of_all for word, of_all in pairs)
            looked_at += sum(word != 0 for word, _ in pairs)
        for name, left, right in zip(
            every.work._fields, skipping.work, every.work, strict=True
        ):
            if not name.startswith("capture"):
                same = torch.equal(left.nan_to_num(-7.0), right.nan_to_num(-7.0))
                assert same, (seed, name)
    assert min(idle, looked_at) > 20 and rows > 10, (idle, looked_at, rows)


def where_awake(plan, name, device):
    """By request: in which tables each of its tokens is looked at."""
    ops = {"kernel": launch, "reference": reference}[name]
    requests = {
        key: Request(torch.zeros(9, WIDTH), prompt_len, plan, [3] * 9)
        for key, prompt_len in (("a", 4), ("b", 3))
    }
    world = World(ops, device, requests, BANK)
    for spans in ([("a", 5), ("b", 2)], [("b", 3), ("a", 1)]):
        world.step(*spans)
    return {
        key: [
            [token for token in range(request.done) if world.words[key, token][table]]
            for table in range(len(plan.tables))
        ]
        for key, request in requests.items()
    }


@pytest.mark.parametrize("name", ["kernel", "reference"])
def test_idle_where_no_clause_is_true(name, device):
    """The last prompt token is read, a gate compares it, generated tokens are written."""
    stage = Stage.STREAM
    last, generated, open_, late = 1 << 0, 1 << 1, 1 << 9, 1 << 10
    own = {"function": Comparison.LESS, "lo": 0.5, "bit": open_, "clause_mask": 0}
    mean = own | {"u": Reduce.MEAN, "v": Scope.REQUEST, "bit": late}
    both = {"function": ClauseKind.AND, "u": late | generated, "clause_mask": 0}
    add = {"opcode": Opcode.ADD, "stage": stage, "u": 2}
    tables = [
        [Entry(Opcode.READ, stage, v=1, clause_mask=last)],
        [Entry(Opcode.COMPARE, stage, **own), Entry(**add, clause_mask=open_)],
        [Entry(**add, clause_mask=generated)],
        [Entry(Opcode.COMPARE, stage, **mean)],
        [Entry(Opcode.LOGIC, stage, bit=1 << 11, **both)],
        [Entry(**add, clause_mask=1 << 11), Entry(**add, clause_mask=last)],
        [Entry(**add, clause_mask=late)],
        [Entry(**add, clause_mask=last, counter=1, bit=generated)],
    ]
    found = where_awake(Plan(tables, CLAUSES[:2], [Scope.REQUEST]), name, device)
    for key, count, prompt_len in (("a", 6, 4), ("b", 5, 3)):
        every = list(range(count))
        last, generated = every[prompt_len - 1 : prompt_len], every[prompt_len:]
        assert found[key] == [
            last,
            last,
            generated,
            every,
            generated,
            last + generated,
            every,
            last + generated,
        ]
