"""The maps of a step against plain integers, and what a step begins with."""

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import POISON, guarded, poisoned
from eyesplice.ops.layout import (
    CLAUSE_WORDS,
    INT32_MAX,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    WORDS,
    ClauseKind,
    Header,
    LogHead,
    Slot,
    Word,
)
from eyesplice.ops.work import empty_work
from tests.kernels.world import Plan, Request, World

IMPLEMENTATIONS = {"kernel": launch, "reference": reference}
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


TABLES = 5
BIT_31 = -(2**31)
HEADERS = [
    # END_NORMED, ADDS, CLAUSES, U of the first entry, what the word holds beside the row
    (1, 0, 0, 9, 0),
    (0, 7, -1, 9, None),
    (1, 1, 0, 1, 1 << 28 | 1 << 13),
    (7, 7, 1 << 3, 32767, 7 << 28 | 32767 << 13),
    (1, 1, BIT_31 | 1 << 5, 32768, 0),
    (2, 2, -1, 0, 0),
    (3, 0, 1 << 20, POISON, 0),
    (0, 0, 0, 0, None),
    (1, 1, BIT_31, 4, 1 << 28 | 4 << 13),
]
"""Header fields by hand; None: the program has nothing to do at the boundary."""


def header_of(k, row):
    """That of a row in table k; row 0 would do something, were it looked at."""
    return HEADERS[(4 * k + row) % len(HEADERS)] if row else HEADERS[2]


def program_tables(num_tables, num_rows, device):
    """int32 `[tables, rows, 1 + 2, WORDS]`, poison but for what a map is made from."""
    tables = poisoned((num_tables, num_rows, 3, WORDS), torch.int32, "cpu")
    for k in range(num_tables):
        for row in range(num_rows):
            *fields, u, _ = header_of(k, row)
            places = [Header.END_NORMED, Header.ADDS, Header.CLAUSES]
            tables[k, row, 0, places] = int32(fields, "cpu", 0)
            tables[k, row, 1, Word.U] = u
    return tables.to(device)


def words_of_rows(k, rows, select):
    """The words in table k of tokens whose programs are in these rows.

    `select` holds their clauses: where none is true that the header asks for, a token is
    idle, unless it asks for none.
    """
    words = []
    for row, bits in zip(rows, select, strict=True):
        _, _, clauses, _, more = header_of(k, row)
        idle = row == 0 or more is None or (clauses and not clauses & bits)
        words.append(0 if idle else row | more)
    return words


def int32(values, device, spare=3):
    """Values, then poison that no request may read."""
    return torch.tensor([*values, *[POISON] * spare], dtype=torch.int32, device=device)


def route(device, requests, extent, programs, max_tokens=None, ops=launch):
    """Maps after one step; requests are (row, prompt_len, first position, tokens)."""
    starts, positions = [0], []
    for _, _, first, count in requests:
        starts.append(starts[-1] + count)
        positions += range(first, first + count)
    size = max_tokens or extent
    filled = torch.full((size,), POISON, dtype=torch.int32)
    # Maps are apart, as they are in an engine.
    maps = guarded(filled.new_full((TABLES, size + 3), POISON).to(device))
    select = guarded(filled.to(device))
    work = empty_work(size, 7, 2, 1, 8, torch.float32, device)
    slots = guarded(filled.to(device))
    fields = [
        [request[0] for request in requests],
        [request[1] for request in requests],
        [(i + 1) * (request[0] != 0) for i, request in enumerate(requests)],
        [0] * len(requests),
    ]
    ops.route_(
        maps.tensor[:, :size],
        program_tables(TABLES, len(programs), device),
        select.tensor,
        list(work._replace(slot_of_token=slots.tensor)),
        torch.stack([int32(field, device) for field in fields]),
        int32(starts, device),
        torch.tensor([*positions, -1, -1], device=device),
        torch.zeros(len(positions), dtype=torch.int64, device=device),
        table(programs).to(device),
        poisoned((len(programs), MAX_TOKEN_IDS), torch.int32, device),
        poisoned((1, 2), torch.int32, device),
        len(requests),
        extent,
        5,
        3,
    )
    assert maps.intact() and select.intact() and slots.intact()
    assert work.capture_log[0, : len(LogHead)].tolist() == [0, 5, 3]
    for i, (row, prompt_len, first, count) in enumerate(requests):
        fields = work.slots[1 + i, [Slot.FIRST_TOKEN, Slot.FIRST_POSITION]].tolist()
        assert fields == ([starts[i], first] if row and count else [0, 0])
        assert int(work.slots[1 + i, Slot.PROMPT_LEN]) == (
            prompt_len if row and count else 0
        )
        at = slice(starts[i], starts[i + 1])
        assert (slots.tensor[at] == (1 + i if row else 0)).all()
    assert not work.slots[0].any()
    assert (slots.tensor[starts[-1] : extent] == 0).all()
    assert (slots.tensor[extent:] == POISON).all()
    assert (maps.tensor[:, extent:] == POISON).all()
    return maps.tensor[:, :size].tolist(), select.tensor.tolist()


def expected(requests, extent, programs, max_tokens=None):
    rows, select = [], []
    for row, prompt_len, first, count in requests:
        for position in range(first, first + count):
            rows.append(row)
            bits = expected_bits(programs[row], position, prompt_len) if row else 0
            select.append(bits)
    idle = [0] * (extent - len(rows))
    untouched = [POISON] * ((max_tokens or extent) - extent)
    words = [words_of_rows(k, rows, select) for k in range(TABLES)]
    maps = [of_table + idle + untouched for of_table in words]
    return maps, select + idle + untouched


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
    _, select = route(device, [(1, 4, 0, 1)], 1, [[], clauses])
    assert select == [-1]


def test_agrees_with_the_reference(device):
    """Random clauses of every kind that only looks at the token itself."""
    generator = torch.Generator().manual_seed(5)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    clauses = integers(-(2**31), 2**31 - 1, 5, MAX_CLAUSES, CLAUSE_WORDS)
    kinds = torch.tensor([k for k in ClauseKind if k != ClauseKind.AFTER]).int()
    clauses[..., 0] = kinds[integers(0, len(kinds), 5, MAX_CLAUSES)]
    ranges = clauses[..., 0] == ClauseKind.RANGE
    clauses[..., 1:3][ranges] %= 20
    listed = clauses[..., 0] == ClauseKind.TOKEN_LIST
    clauses[..., 1:3][listed] %= MAX_TOKEN_IDS + 1
    clauses[..., 1][clauses[..., 0] == ClauseKind.TOKEN_SET] %= 3
    clauses[0] = 0
    starts = torch.cat([torch.zeros(1), integers(0, 9, 12).cumsum(0)]).int()
    num_tokens = int(starts[-1])
    per_request = torch.stack([integers(0, 5, 12), integers(1, 20, 12)] * 2)
    per_request[2] = torch.arange(1, 13)
    per_request[3] = integers(0, 3, 12)
    per_request[:, per_request[0] == 0] = 0
    programs = integers(-(2**31), 2**31 - 1, 9, 5, 4, WORDS)
    programs[:, :, 0, Header.END_NORMED] = integers(0, 3, 9, 5)
    programs[:, :, 0, Header.ADDS] = integers(0, 8, 9, 5)
    programs[:, :, 0, Header.CLAUSES] = (
        integers(-(2**31), 2**31 - 1, 9, 5)
        & integers(-(2**31), 2**31 - 1, 9, 5)
        & integers(-(2**31), 2**31 - 1, 9, 5) * integers(0, 2, 9, 5)
    )
    programs[:, :, 1, Word.U] = integers(-3, 2**16, 9, 5)
    args = (
        per_request,
        starts,
        integers(0, 30, num_tokens).long(),
        integers(0, 100, num_tokens),
        clauses,
        integers(0, 100, 5, MAX_TOKEN_IDS),
        integers(-(2**31), 2**31 - 1, 3, 3),
    )
    results = []
    for ops in (reference, launch):
        words = torch.full((9, num_tokens + 6), POISON, dtype=torch.int32)
        select = words[0].clone()
        work = empty_work(num_tokens + 3, 13, 2, 1, 8, torch.float32, "cpu")
        work.score.zero_()
        where = "cpu" if ops is reference else device
        tensors = [tensor.to(where) for tensor in (words, select, *work)]
        first, inputs = programs.to(where), [arg.to(where) for arg in args]
        ops.route_(
            *(tensors[0], first, tensors[1], tensors[2:]),
            *(*inputs, 12, num_tokens + 3, 0, 0),
        )
        results.append([tensor.cpu() for tensor in tensors])
    for low, high in zip(*results, strict=True):
        assert torch.equal(low.nan_to_num(nan=-5.0), high.nan_to_num(nan=-5.0))
    assert results[0][5].isnan().any() and (results[0][5] == 0).any()
    # Some programs act at some of their tokens, in some tables.
    words = results[0][0][:, :num_tokens]
    assert ((words == 0).any(dim=0) & (words != 0).any(dim=0)).any()


def test_a_step_after_another_of_the_same_tables(device):
    """What is launched again has this step's requests, positions and extent."""
    maps = torch.full((TABLES, 16), POISON, dtype=torch.int32, device=device)
    program = program_tables(TABLES, len(PROGRAMS), device)
    select = maps[0].clone()
    work = list(empty_work(16, 4, 1, 1, 8, torch.float32, device))
    clauses = table(PROGRAMS).to(device)
    ids = poisoned((len(PROGRAMS), MAX_TOKEN_IDS), torch.int32, device)
    sets = poisoned((1, 2), torch.int32, device)
    row, prompt_len = 1, 6
    for first, count, extent, start in ((0, 5, 9, 3), (5, 1, 5, 4), (6, 2, 16, 5)):
        fields = [[row], [prompt_len], [1], [0]]
        launch.route_(
            *(maps, program, select, work),
            torch.stack([int32(field, device) for field in fields]),
            int32([0, count], device),
            torch.tensor([*range(first, first + count), -1], device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            *(clauses, ids, sets, 1, extent, start, 1),
        )
        bits = [
            expected_bits(PROGRAMS[row], first + token, prompt_len)
            for token in range(count)
        ]
        idle = [0] * (extent - count)
        for k, words in enumerate(maps[:, :extent].tolist()):
            assert words == words_of_rows(k, [row] * count, bits) + idle
        assert select[:extent].tolist() == bits + idle
        assert work[6][0, : len(LogHead)].tolist() == [0, start, 1]
        maps[:, :extent] = select[:extent] = POISON
    assert (maps == POISON).all() and (select == POISON).all()


def test_extent_beyond_the_maps_is_refused(device):
    with pytest.raises(ValueError, match="extent 9"):
        route(device, [], 9, PROGRAMS, max_tokens=8)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tables", [1, 2, 65, 300])
def test_every_table_has_a_map_of_its_own(num_tables, name, device):
    """Requests of 1, 63 and 2000 tokens, one without a program, and idle tokens."""
    lengths, rows = [1, 63, 1, 2000, 7, 0, 1], [3, 1, 0, 2, 4, 1, 5]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    extent = starts[-1] + 50
    size = extent + 5
    words = poisoned((num_tables, size), torch.int32, device)
    work = empty_work(size, 1, 1, 1, 8, torch.float32, device)
    clauses = torch.zeros(6, MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
    clauses[1:, 3, 0] = ClauseKind.ALL
    clauses[2, 3] = torch.tensor([ClauseKind.RANGE, 500, 700, 0])
    no_ids = torch.zeros(6, MAX_TOKEN_IDS, dtype=torch.int32, device=device)
    IMPLEMENTATIONS[name].route_(
        words,
        program_tables(num_tables, 6, device),
        poisoned((size,), torch.int32, device),
        list(work),
        torch.stack([int32(rows, device), *[int32([0] * 7, device)] * 3]),
        int32(starts, device),
        torch.arange(size, device=device),
        torch.zeros(size, dtype=torch.int64, device=device),
        clauses.to(device),
        no_ids,
        no_ids[:1],
        len(rows),
        extent,
        0,
        0,
    )
    of_tokens = [row for row, n in zip(rows, lengths, strict=True) for _ in range(n)]
    select = [
        8 * (row != 2 or 500 <= token < 700) for token, row in enumerate(of_tokens)
    ]
    for k, found in enumerate(words.tolist()):
        expected = words_of_rows(k, of_tokens, select)
        assert found == expected + [0] * 50 + [POISON] * 5, k


def test_maps_of_other_tables_and_programs_with_gaps_are_refused(device):
    def attempt(maps, programs):
        work = empty_work(8, 1, 1, 1, 8, torch.float32, device)
        some = torch.zeros(4, 2, dtype=torch.int32, device=device)
        clauses = table([[]]).to(device)
        launch.route_(
            *(maps, programs, maps[0], list(work), some, some[0], some[0].long()),
            *(some[0], clauses, some, some, 0, 8, 0, 0),
        )

    maps = torch.zeros(3, 8, dtype=torch.int32, device=device)
    programs = program_tables(3, 2, device)
    attempt(maps, programs)
    with pytest.raises(ValueError, match="2 maps for 3 tables"):
        attempt(maps[:2], programs)
    with pytest.raises(ValueError, match="slots must be contiguous"):
        attempt(maps, programs[:, :, ::2])
    with pytest.raises(ValueError, match="token_map: rows must be contiguous"):
        attempt(maps[:, ::2], programs)


IDS = {"a": [7, 3, 31, 67, 7, 9, 96, 31, 0, 7], "b": [31, 7, 7, 128, -1, 3]}
TOKENS = Plan(
    [],
    [
        (ClauseKind.TOKEN_LIST, 0, 1, 0),
        (ClauseKind.TOKEN_LIST, 1, 3, 0),
        (ClauseKind.TOKEN_LIST, 2, 2, 0),
        (ClauseKind.TOKEN_SET, 1, 0, 0),
        (ClauseKind.AFTER, 1 << 1, 0, 0),
        (ClauseKind.AND, 1 << 0 | 1 << 4, 0, 0),
        (ClauseKind.AFTER, 1 << 5, 0, 0),
        *[(ClauseKind.FALSE, 0, 0, 0)] * 23,
        (ClauseKind.TOKEN_LIST, 0, 1, 0),
        (ClauseKind.AFTER, 1 << 30, 0, 0),
    ],
    token_ids=[7, 9, 3],
)


def token_bits(ids):
    """{bit: where it is set}; token set 1 of `World` holds 31 and 67."""

    def after(true):
        return [any(true[:i]) for i in range(len(true))]

    bits = {
        0: [t == 7 for t in ids],
        1: [t in (9, 3) for t in ids],
        2: [False] * len(ids),
        3: [t in (31, 67) for t in ids],
    }
    bits[4] = after(bits[1])
    bits[5] = [x and y for x, y in zip(bits[0], bits[4], strict=True)]
    bits[6] = after(bits[5])
    return bits | {30: bits[0], 31: after(bits[0])}


@pytest.mark.parametrize(
    "schedule",
    [
        [[("a", 10), ("b", 6)]],
        [[("b", 1), ("a", 4)], [("a", 6)], [("b", 5)]],
        [[("a", 1), ("b", 1)]] * 6 + [[("a", 1)]] * 4,
    ],
    ids=["whole", "chunks", "one by one"],
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_clauses_of_token_ids(name, schedule, device):
    requests = {
        key: Request(torch.zeros(len(ids), 4), 4, TOKENS, ids)
        for key, ids in IDS.items()
    }
    world = World(IMPLEMENTATIONS[name], device, requests, torch.zeros(2, 4))
    for spans in schedule:
        world.step(*spans)
    for key, ids in IDS.items():
        for bit, expected in token_bits(ids).items():
            assert world.bit(key, bit) == expected, (key, bit)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_after_a_token_blocks_ago(name, device):
    """More tokens than a block of the kernel, then another step."""
    count = 2500
    clauses = table([[], [(ClauseKind.FALSE, 0, 0, 0)] * MAX_CLAUSES])
    clauses[1, 0] = torch.tensor([ClauseKind.RANGE, 1022, 1024, 0])
    clauses[1, 1] = torch.tensor([ClauseKind.AFTER, 1, 0, 0])
    clauses[1, 30] = torch.tensor([ClauseKind.RANGE, 2600, INT32_MAX, 0])
    clauses[1, 31] = torch.tensor([ClauseKind.AFTER, 1 << 30, 0, 0])
    work = empty_work(count, 2, 1, 1, 8, torch.float32, device)
    words, select = torch.zeros(2, count, dtype=torch.int32, device=device)
    ids = torch.zeros(2, MAX_TOKEN_IDS, dtype=torch.int32, device=device)
    for begin, end in ((0, count), (count, 2 * count)):
        IMPLEMENTATIONS[name].route_(
            words[None],
            program_tables(1, 2, device),
            select,
            list(work),
            int32([1, 9, 1, 0], device, 0)[:, None],
            int32([0, count], device),
            torch.arange(begin, end, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            clauses.to(device),
            ids,
            ids[:1],
            1,
            count,
            0,
            0,
        )
        position = torch.arange(begin, end, device=device)
        assert torch.equal((select & 2) != 0, position > 1022)
        assert torch.equal(select < 0, position > 2600)
