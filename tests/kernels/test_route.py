import pytest
import torch

from eyesplice.ops import launch
from eyesplice.ops.inputs import POISON, guarded
from eyesplice.ops.layout import (
    CLAUSE_WORDS,
    INT32_MAX,
    MAX_CLAUSES,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
)

START, STOP = RANGE_START_FROM_PROMPT_END, RANGE_STOP_FROM_PROMPT_END

CLAUSES = [
    (ClauseKind.ALL, 0, 0, 0),
    (ClauseKind.PROMPT, 0, 0, 0),
    (ClauseKind.GENERATED, 0, 0, 0),
    (ClauseKind.LAST, 0, 0, 0),
    (ClauseKind.RANGE, 2, 5, 0),
    (ClauseKind.RANGE, -3, 0, START | STOP),
    (ClauseKind.RANGE, -2, INT32_MAX, START),
    (ClauseKind.RANGE, 1, INT32_MAX, START | STOP),
    (ClauseKind.AND, 0b11, 0, 0),
    (ClauseKind.OR, 0b1100, 0, 0),
    (ClauseKind.NOR, 0b1100, 0, 0),
    (ClauseKind.FALSE, 7, 7, 7),
]
LAST_BIT = [(ClauseKind.FALSE, 0, 0, 0)] * 31 + [(ClauseKind.GENERATED, 0, 0, 0)]


def expected_bits(clauses, position, prompt_len):
    """The clauses of one token, in plain integers."""
    bits = 0
    for j, (kind, a, b, flags) in enumerate(clauses):
        start = a + prompt_len * bool(flags & START)
        stop = b + prompt_len * bool(flags & STOP)
        true = {
            ClauseKind.FALSE: False,
            ClauseKind.ALL: True,
            ClauseKind.PROMPT: position < prompt_len,
            ClauseKind.GENERATED: position >= prompt_len,
            ClauseKind.LAST: position == prompt_len - 1,
            ClauseKind.RANGE: start <= position < stop,
            ClauseKind.AND: bits & a == a,
            ClauseKind.OR: bits & a != 0,
            ClauseKind.NOR: bits & a == 0,
        }[kind]
        bits |= true << j
    return bits - 2**32 if bits >= 2**31 else bits


def table(programs):
    rows = torch.zeros(len(programs), MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
    for row, clauses in enumerate(programs):
        for j, clause in enumerate(clauses):
            rows[row, j] = torch.tensor(clause)
    return rows


def int32(values, device, spare=3):
    """Values, then poison that no request may read."""
    return torch.tensor([*values, *[POISON] * spare], dtype=torch.int32, device=device)


def route(device, requests, extent, programs, max_tokens=None):
    """Maps after one step; requests are (row, prompt_len, first position, tokens)."""
    starts, positions = [0], []
    for _, _, first, count in requests:
        starts.append(starts[-1] + count)
        positions += range(first, first + count)
    filled = torch.full((max_tokens or extent,), POISON, dtype=torch.int32)
    rows, select = guarded(filled.to(device)), guarded(filled.to(device))
    launch.route_(
        rows.tensor,
        select.tensor,
        int32([request[0] for request in requests], device),
        int32([request[1] for request in requests], device),
        int32(starts, device),
        torch.tensor([*positions, -1, -1], device=device),
        table(programs).to(device),
        len(requests),
        extent,
    )
    assert rows.intact()
    assert select.intact()
    return rows.tensor.tolist(), select.tensor.tolist()


def expected(requests, extent, programs, max_tokens=None):
    rows, select = [], []
    for row, prompt_len, first, count in requests:
        for position in range(first, first + count):
            rows.append(row)
            bits = expected_bits(programs[row], position, prompt_len) if row else 0
            select.append(bits)
    idle = [0] * (extent - len(rows))
    untouched = [POISON] * ((max_tokens or extent) - extent)
    return rows + idle + untouched, select + idle + untouched


PROGRAMS = [[], CLAUSES, LAST_BIT]
STEPS = {
    "nothing": ([], 0),
    "no requests": ([], 9),
    "decode": ([(1, 6, 6, 1), (0, 6, 9, 1), (2, 3, 40, 1)], 3),
    "decode, padded": ([(1, 6, 6, 1), (2, 3, 40, 1), (1, 9, 8, 1)], 8),
    "mixed": ([(1, 6, 0, 6), (2, 3, 2, 5), (0, 4, 0, 4), (1, 8, 7, 3)], 24),
    "chunked prompt": ([(1, 2100, 1000, 1100)], 1101),
    "exactly a block": ([(2, 5, 0, 1024), (1, 5, 0, 1024)], 2048),
    "a request of no tokens": ([(1, 6, 6, 0), (2, 3, 3, 2)], 4),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name, device):
    requests, extent = STEPS[name]
    step = (requests, extent, PROGRAMS, extent + 5)
    assert route(device, *step) == expected(*step)


@pytest.mark.parametrize("prompt_len", [1, 2, 7])
def test_every_clause_at_every_position(prompt_len, device):
    step = ([(1, prompt_len, 0, 12), (2, prompt_len, 0, 12)], 24, PROGRAMS)
    assert route(device, *step) == expected(*step)


def test_bit_31_feeds_a_mask(device):
    clauses = [(ClauseKind.ALL, 0, 0, 0)] * 32
    clauses[30] = (ClauseKind.AND, 2**30 - 1, 0, 0)
    clauses[31] = (ClauseKind.NOR, -(2**31), 0, 0)
    rows, select = route(device, [(1, 4, 0, 1)], 1, [[], clauses])
    assert (rows, select) == ([1], [-1])


def test_agrees_with_the_reference(device):
    from eyesplice.ops import reference

    generator = torch.Generator().manual_seed(5)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    clauses = integers(-(2**31), 2**31 - 1, 5, MAX_CLAUSES, CLAUSE_WORDS)
    clauses[..., 0] = integers(0, len(ClauseKind), 5, MAX_CLAUSES)
    ranges = clauses[..., 0] == ClauseKind.RANGE
    clauses[..., 1:3][ranges] %= 20
    clauses[0] = 0
    starts = torch.cat([torch.zeros(1), integers(0, 9, 12).cumsum(0)]).int()
    num_tokens = int(starts[-1])
    args = (
        integers(0, 5, 12),
        integers(1, 20, 12),
        starts,
        integers(0, 30, num_tokens).long(),
        clauses,
    )
    maps = torch.full((2, num_tokens + 6), POISON, dtype=torch.int32)
    low, high = maps.clone(), maps.to(device)
    reference.route_(*low, *args, 12, num_tokens + 3)
    launch.route_(*high, *(arg.to(device) for arg in args), 12, num_tokens + 3)
    assert torch.equal(high.cpu(), low)


def test_extent_beyond_the_maps_is_refused(device):
    with pytest.raises(ValueError, match="extent 9"):
        route(device, [], 9, PROGRAMS, max_tokens=8)
