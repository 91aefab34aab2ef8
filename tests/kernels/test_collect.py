"""What a step carries over to the next, against exact numbers."""

from fractions import Fraction

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import poisoned
from eyesplice.ops.layout import (
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    Carry,
    Scope,
    Slot,
)
from eyesplice.ops.work import empty_work
from tests.kernels.test_gates import fixed

IMPLEMENTATIONS = {"kernel": launch, "reference": reference}
REQUESTS = [
    # (row, prompt_len, slot, scores, first position, tokens)
    (1, 400, 2, 3, 0, 300),
    (0, 9, 0, 0, 3, 4),
    (2, 5, 4, 2, 3, 4),
    (1, 7, 1, 3, 7, 1),
    (1, 7, 3, 3, 7, 0),
]
SCOPES = [
    [0, 0, 0],
    [Scope.PROMPT, Scope.GENERATED, Scope.REQUEST],
    [Scope.NONE, Scope.GENERATED, 99],
]
LATCHES = [0, 1 << 3 | -(2**31), 0]


def collect(ops, device, steps):
    """(work, scores of every step, select of every step) after `steps` equal steps."""
    generator = torch.Generator().manual_seed(4)
    count = sum(request[-1] for request in REQUESTS)
    work = empty_work(count, 6, 3, 1, 8, torch.float32, device)
    starts = [0]
    for request in REQUESTS:
        starts.append(starts[-1] + request[-1])
    per_request = poisoned((4, 7), torch.int32, "cpu")
    per_request[:, :5] = torch.tensor([request[:4] for request in REQUESTS]).T
    positions = [r[4] + i for r in REQUESTS for i in range(r[5])]
    reads = torch.tensor([[*s, x] for s, x in zip(SCOPES, LATCHES, strict=True)])
    scores, selects = [], []
    for _ in range(steps):
        score = 100 * torch.randn(count, 3, generator=generator)
        score[::5] = torch.nan
        score[3], score[7], score[8] = 1e30, -torch.inf, -0.0
        select = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
        select &= ~(1 << 3)
        work.score.copy_(score)
        ops.collect_(
            list(work),
            select.to(device),
            reads.int().to(device),
            per_request.to(device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(positions, device=device),
            len(REQUESTS),
        )
        scores.append(score)
        selects.append(select)
    return work, scores, selects, starts


def bits(number):
    return int(torch.tensor(number).view(torch.int32))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_reductions_are_exact(name, steps, device):
    work, scores, _, starts = collect(IMPLEMENTATIONS[name], device, steps)
    expected = torch.zeros_like(work.carry, device="cpu")
    for (row, prompt_len, slot, num_scores, first, _), start, stop in zip(
        REQUESTS, starts, starts[1:], strict=False
    ):
        for k in range(num_scores):
            counted = [
                float(score[token, k])
                for score in scores
                for token in range(start, stop)
                if not score[token, k].isnan()
                and in_scope(SCOPES[row][k], first + token - start, prompt_len)
            ]
            if counted:
                field = expected[slot, k]
                field[Carry.COUNT] = len(counted)
                field[Carry.SUM] = int(sum(map(cut, counted)))
                field[Carry.MAX] = bits(max(counted))
                field[Carry.LAST] = bits(counted[-1])
    assert torch.equal(work.carry.cpu(), expected)
    assert int(expected[1, 1, Carry.COUNT]) + int(expected[4, 1, Carry.COUNT]) > 0


def cut(score):
    """`fixed`, of infinities too."""
    return fixed(max(min(score, SCORE_LIMIT), -SCORE_LIMIT))


def in_scope(scope, position, prompt_len):
    return {
        Scope.NONE: False,
        Scope.PROMPT: position < prompt_len,
        Scope.GENERATED: position >= prompt_len,
        Scope.REQUEST: True,
    }[scope]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_latches_join(name, device):
    work, _, selects, starts = collect(IMPLEMENTATIONS[name], device, 2)
    for (row, _, slot, *_), start, stop in zip(
        REQUESTS, starts, starts[1:], strict=False
    ):
        true = 0
        for select in selects:
            for word in select[start:stop].tolist():
                true |= word & LATCHES[row]
        assert int(work.slots[slot, Slot.LATCHED]) == true
    assert int(work.slots[2, Slot.LATCHED]) == -(2**31)


def test_halves_round_up():
    half = 0.5 / 2**SCORE_FRACTION_BITS
    assert [fixed(x * half) for x in (-3, -1, 1, 3)] == [-1, 0, 1, 2]
    assert fixed(0.1) == Fraction(104858)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_requests(name, device):
    work = empty_work(4, 2, 1, 1, 8, torch.float32, device)
    empty = torch.zeros(4, 0, dtype=torch.int32, device=device)
    IMPLEMENTATIONS[name].collect_(
        list(work), empty[0], empty, empty, empty[0], empty[0], 0
    )
    assert not work.carry.any()
