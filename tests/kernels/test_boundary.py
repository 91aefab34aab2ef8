import dataclasses

import pytest
import torch

from eyesplice.ops import launch
from eyesplice.ops.inputs import (
    Entry,
    guarded,
    map_words,
    pack_programs,
    poisoned,
    random_case,
)
from eyesplice.ops.layout import (
    GENERAL,
    PRESERVE_NORM,
    Function,
    Header,
    Opcode,
    Stage,
)
from eyesplice.ops.simple import simple
from eyesplice.ops.site_tables import ALIGNED, SiteTables, open_tables
from eyesplice.ops.work import empty_work
from tests.kernels import ruler

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# The interpreter takes some 20 ms a token: there every size is met once.
SIZES = (
    [(t, h) for h in (576, 1536, 4096, 8192) for t in (1, 63, 100, 2000)]
    if ON_GPU
    else [(1, 576), (63, 576), (100, 1536), (7, 4096), (7, 8192)]
)


def run(case, **options):
    """(h, y) of the kernel, with the written tensor guarded."""
    stream = guarded(case.stream)
    normed = launch.boundary_(
        stream.tensor,
        case.branch,
        case.weight,
        case.weight_offset,
        case.eps,
        *case.tables,
        **options,
    )
    assert stream.intact()
    assert normed.dtype == case.stream.dtype
    assert normed.is_contiguous()
    return stream.tensor, normed


def check(case, roundings=1, **options):
    expected = ruler.boundary(case)
    low_stream, low_normed = ruler.reference_boundary(case)
    stream, normed = run(case, **options)
    ruler.assert_within("stream", stream, expected.stream, low_stream)
    ruler.assert_within("normed", normed, expected.normed, low_normed, roundings)


def same_bits(a, b):
    """Equality that tells zeros apart and takes a NaN for itself."""
    return torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), SIZES)
def test_sizes(num_tokens, hidden_size, dtype, device):
    check(random_case(num_tokens, hidden_size, dtype, seed=1, device=device))


def test_many_tokens(device):
    case = random_case(2000, 48, torch.float32, device=device)
    case.token_map[30:1980] = 0
    check(case)


OPTIONS = {
    "fp32 weight": {"weight_dtype": torch.float32},
    "gemma": {"weight_offset": 1.0},
    "no branch": {"has_branch": False},
    "bank wider": {"extra_width": 64},
    "width not a multiple of 16": {"width": 90},
    "no entries": {"per_stage": 0},
    "eight entries a stage": {"per_stage": 8, "max_gain": 0.1},
    "every token active": {"num_programs": 0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype, device):
    options = {"width": 576, "seed": 2, "device": device, **OPTIONS[name]}
    if name == "every token active":
        case = random_case(17, dtype=dtype, **(options | {"num_programs": 5}))
        case.token_map[:17] = 4
    else:
        case = random_case(17, dtype=dtype, **options)
    check(case)


@pytest.mark.parametrize("simple", [True, False])
@pytest.mark.parametrize(("warps", "registers"), [(1, None), (4, 40), (16, 32)])
def test_launch_parameters(warps, registers, simple, device):
    case = random_case(19, 576, torch.bfloat16, seed=3, device=device)
    check(case, launch=launch.Launch(warps, registers, simple))


USED = (1, 3, 6, 7, 8)
"""Rows of a random case's bank that are not poison."""


def simple_entry(i, counted):
    """Every third projects."""
    return Entry(
        Opcode.RANK1 if i % 3 == 2 else Opcode.ADD,
        Stage.STREAM,
        u=USED[i % 5],
        v=USED[(i + 1) % 5],
        gain=0.5 - 0.1 * i,
        in_scale=0.02,
        bias=0.1,
        clause_mask=1 << (i % 3),
        counter=1 + i if counted else 0,
        bit=1 << (i % 3),
    )


def simple_programs(device, dtype, has_branch=True, counted=False):
    """A case whose eight programs add with 1 to 8 entries; every ninth token is idle."""
    tokens, width = 40, 576
    case = random_case(
        tokens, width, dtype, seed=9, device=device, has_branch=has_branch
    )
    programs = [
        [simple_entry(i, counted) for i in range(count)] for count in range(1, 9)
    ]
    case.token_map[:tokens] = torch.arange(tokens) % 9
    work = empty_work(tokens, 9, 3, 5, width, dtype, device)
    work.slot_of_token.copy_(case.token_map[:tokens])
    return dataclasses.replace(
        case,
        programs=tuple(map(tuple, programs)),
        program=pack_programs(programs, 8).to(device),
        work=work,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_branch", [True, False])
def test_programs_that_only_add(has_branch, dtype, device):
    case = simple_programs(device, dtype, has_branch)
    assert case.program[1:, 0, Header.SIMPLE].tolist() == list(range(1, 9))
    check(case, launch=launch.Launch(4))


def test_receipts_of_programs_that_only_add(device):
    """The loop of simple programs counts what the general part counts."""
    counts = []
    for chosen in (launch.Launch(4), launch.Launch(4, simple=False)):
        case = simple_programs(device, torch.bfloat16, counted=True)
        run(case, launch=chosen)
        counts.append(case.work.counts)
    assert counts[0].sum() > 0
    assert torch.equal(*counts)


ON_X = [Entry(Opcode.ADD, Stage.BRANCH, u=3, gain=0.7)]
MIXED = [
    Entry(Opcode.ADD, Stage.BRANCH if i % 2 else Stage.STREAM, u=USED[i % 5], gain=0.7)
    for i in range(8)
]
PROJECTED = Entry(Opcode.RANK1, Stage.STREAM, u=6, v=7, gain=-1.0, in_scale=0.02)
ADDING = {
    "counted, on x": [dataclasses.replace(ON_X[0], counter=1, bit=1)],
    "counted, on h": [Entry(Opcode.ADD, Stage.STREAM, u=3, counter=1, bit=1)],
    "eight, on x and on h": MIXED,
    "on x, and a projection": [*ON_X, PROJECTED],
    "two on x": ON_X * 2,
}


@pytest.mark.parametrize("name", ADDING)
def test_the_size_of_a_batch_changes_no_bit(name, device):
    """It decides whether simple programs have their loop, and where vectors load."""
    entries = sorted(ADDING[name], key=lambda entry: entry.stage)
    case = random_case(12, 576, torch.float32, seed=3, device=device)
    case.token_map[:12] = map_words([t % 2 for t in range(12)], [entries]).to(device)
    work = empty_work(12, 2, 3, 5, 576, torch.float32, device)
    case = dataclasses.replace(
        case,
        programs=(tuple(entries),),
        program=pack_programs([entries], 9).to(device),
        work=work,
    )
    few = run(case, launch=launch.Launch(4))
    for chosen in (
        launch.Launch(4, 64, simple=False),
        launch.Launch(4, 40, simple=False, ahead=False),
    ):
        assert all(map(same_bits, few, run(case, launch=chosen)))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], 0),
        ([Entry(Opcode.ADD, Stage.STREAM, 1), Entry(Opcode.ADD, Stage.STREAM, 2)], 2),
        ([Entry(Opcode.ADD, Stage.BRANCH, 1)], GENERAL),
        ([Entry(Opcode.RANK1, Stage.STREAM, 1)], 1),
        ([Entry(Opcode.RANK1, Stage.BRANCH, 1)], GENERAL),
        ([Entry(Opcode.ADD, Stage.NORMED, 1)], GENERAL),
        ([Entry(Opcode.ADD, Stage.STREAM, 1, flags=PRESERVE_NORM)], GENERAL),
        ([Entry(Opcode.RANK1, Stage.STREAM, 1, function=Function.RELU)], GENERAL),
        ([Entry(Opcode.READ, Stage.STREAM, 1)], GENERAL),
        (
            [Entry(Opcode.ADD, Stage.STREAM, 1), Entry(Opcode.MASK, Stage.STREAM, 1)],
            GENERAL,
        ),
    ],
)
def test_what_is_simple(entries, expected):
    assert simple(entries) == expected


def test_an_early_launch_waits_for_the_kernel_before(device):
    """The branch comes from a long product that has not ended when the op starts."""
    if device != "cuda":
        pytest.skip("the interpreter runs one kernel after the other")
    case = random_case(64, 4096, torch.bfloat16, seed=8, device=device)
    factor = torch.eye(4096, dtype=torch.bfloat16, device=device)
    expected = run(case)

    def step():
        stream = case.stream.clone()
        branch = torch.full_like(case.branch, torch.nan)
        torch.mm(case.branch, factor, out=branch)
        head = (stream, branch, case.weight, case.weight_offset, case.eps)
        chosen = launch.Launch(16, early=True)
        return stream, launch.boundary_(*head, *case.tables, launch=chosen)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(200):
        graph.replay()
        for value, known in zip(results, expected, strict=True):
            assert same_bits(value, known)


def test_round_before_weight(device):
    case = random_case(19, 576, torch.bfloat16, seed=4, device=device, per_stage=0)
    check(case, roundings=2, round_before_weight=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_idle_tokens_keep_the_bits_of_an_idle_batch(dtype, device):
    case = random_case(30, 576, dtype, seed=5, device=device)
    idle = dataclasses.replace(case, token_map=torch.zeros_like(case.token_map))
    at = case.token_map[:30] == 0
    for mixed, alone in zip(run(case), run(idle), strict=True):
        assert same_bits(mixed[at], alone[at])
        assert not same_bits(mixed[~at], alone[~at])


def test_a_poisoned_token_stays_alone(device):
    case = random_case(30, 576, torch.bfloat16, seed=6, device=device)
    clean = run(case)
    case.stream[12] = torch.nan
    for value, expected in zip(run(case), clean, strict=True):
        at = torch.arange(30, device=device) != 12
        assert value[12].isnan().all()
        assert same_bits(value[at], expected[at])


def test_first_norm_leaves_an_idle_stream_alone(device):
    case = random_case(4, 576, torch.bfloat16, has_branch=False, device=device)
    case.token_map.zero_()
    case.stream[0] = -0.0
    assert same_bits(run(case)[0], case.stream)


@pytest.mark.parametrize("simple", [True, False])
def test_a_program_that_only_reads_leaves_zeros_their_signs(simple, device):
    """At the first norm too, where there is nothing to add to the stream."""
    case = random_case(
        4, 576, torch.float32, has_branch=False, device=device, num_programs=1
    )
    entries = [Entry(Opcode.READ, Stage.STREAM, v=1)]
    work = empty_work(4, 2, 3, 5, 576, torch.float32, device)
    case = dataclasses.replace(
        case,
        programs=(tuple(entries),),
        program=pack_programs([entries], 3).to(device),
        work=work,
    )
    case.stream[:, ::2] = -0.0
    idle = dataclasses.replace(case, token_map=torch.zeros_like(case.token_map))
    chosen = launch.Launch(4, simple=simple)
    for read, alone in zip(
        run(case, launch=chosen), run(idle, launch=chosen), strict=True
    ):
        assert same_bits(read, alone)
    assert not work.score[1, 0].isnan()


def test_clause_of_bit_31(device):
    entries = [Entry(Opcode.ADD, Stage.STREAM, 1, clause_mask=-(2**31), gain=2.0)]
    case = random_case(2, 576, torch.float32, device=device, num_programs=1)
    case = dataclasses.replace(
        case,
        programs=(tuple(entries),),
        program=pack_programs([entries], 3).to(device),
    )
    case.token_map[:2] = 1
    case.select[:2] = torch.tensor([2**31 - 1, -(2**31)])
    stream, _ = run(case)
    plain = case.stream + case.branch
    assert same_bits(stream[0], plain[0])
    torch.testing.assert_close(stream[1], plain[1] + 2 * case.bank[1])
    check(case)


def test_offsets_beyond_int32(device):
    """A bank of 4 GiB, of which two rows are ever touched."""
    width = 64
    far = 2**31 // width + 3
    case = random_case(3, width, torch.bfloat16, device=device, num_programs=1)
    entries = [
        Entry(Opcode.ADD, Stage.STREAM, far),
        Entry(Opcode.RANK1, Stage.NORMED, far, v=far, in_scale=0.1),
    ]
    bank = torch.empty(far + 1, width, dtype=torch.bfloat16, device=device)
    bank[far] = torch.linspace(-1, 1, width)
    case = dataclasses.replace(
        case,
        bank=bank,
        programs=(tuple(entries),),
        program=pack_programs([entries], 2).to(device),
    )
    case.token_map[:3] = 1
    check(case)


def test_rows_apart_are_handled(device):
    case = random_case(9, 576, torch.bfloat16, seed=7, device=device)
    wide = poisoned((9, 640), torch.bfloat16, device)
    wide[:, :576] = case.stream
    branch = torch.cat([case.branch, case.branch], dim=1)[:, :576]
    normed = launch.boundary_(
        wide[:, :576], branch, case.weight, 0.0, case.eps, *case.tables
    )
    stream, expected = run(case)
    assert same_bits(wide[:, :576], stream)
    assert same_bits(normed, expected)
    assert wide[:, 576:].isnan().all()


@pytest.mark.parametrize("name", ["stream", "branch", "weight", "bank", "program"])
def test_elements_apart_are_refused(name, device):
    case = random_case(4, 32, torch.bfloat16, device=device)
    tensor = getattr(case, name)
    apart = torch.stack([tensor, tensor], dim=-1)[..., 0]
    case = dataclasses.replace(case, **{name: apart})
    with pytest.raises(ValueError, match=name):
        launch.boundary_(
            case.stream, case.branch, case.weight, 0.0, case.eps, *case.tables
        )


def test_maps_too_short_and_bank_too_narrow_are_refused(device):
    case = random_case(4, 32, torch.bfloat16, device=device)
    maps, select, program, bank, *rest = case.tables
    args = (case.stream, case.branch, case.weight, 0.0, case.eps)
    with pytest.raises(ValueError, match="4 tokens"):
        launch.boundary_(*args, maps[:3], select, program, bank, *rest)
    with pytest.raises(ValueError, match="32 wide"):
        launch.boundary_(*args, maps, select, program, bank[:, :31], *rest)


def test_no_tokens(device):
    case = random_case(0, 576, torch.bfloat16, device=device)
    stream, normed = run(case)
    assert stream.shape == normed.shape == (0, 576)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_launch_reads_the_tables_at_replay():
    case = random_case(8, 576, torch.bfloat16, seed=8, device="cuda")
    program = case.program.clone()
    expected = run(case)
    stream = case.stream.clone()
    case.program.zero_()

    token_map, select, _, bank, work, families = case.tables
    site = SiteTables(token_map, select, bank, work)
    open_tables(case.program, [(case.program, site)])

    def call():
        return torch.ops.eyesplice.boundary_(
            *(stream, case.branch, case.weight, 0.0, case.eps),
            *(case.program, int(families)),
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normed = call()
    case.program.copy_(program)
    stream.copy_(case.stream)
    graph.replay()
    assert same_bits(stream, expected[0])
    assert same_bits(normed, expected[1])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [8, 600])
def test_a_launch_kept_for_one_table_runs_the_program_of_another(tokens):
    """Layers share what is kept: only addresses are their own."""
    case = random_case(tokens, 576, torch.bfloat16, seed=9, device="cuda")
    expected, normed = run(case)
    idle, plain = run(dataclasses.replace(case, program=torch.zeros_like(case.program)))
    token_map, select, program, bank, work, families = case.tables
    programs = torch.stack([torch.zeros_like(program), program])
    # Rows apart as an engine's: launches are shared by addresses aligned alike.
    room = token_map.numel()
    maps = token_map.new_empty(2, -(-room // ALIGNED) * ALIGNED)[:, :room]
    maps.copy_(token_map)
    sites = [
        (one, SiteTables(words, select, bank, work))
        for one, words in zip(programs, maps, strict=True)
    ]
    open_tables(case.program, sites)
    assert sites[0][1].launches is sites[1][1].launches
    for place, wanted in ((0, (idle, plain)), (1, (expected, normed))) * 2:
        stream = case.stream.clone()
        y = torch.ops.eyesplice.boundary_(
            *(stream, case.branch, case.weight, case.weight_offset, case.eps),
            *(programs[place], int(families)),
        )
        assert same_bits(stream, wanted[0]) and same_bits(y, wanted[1])


@pytest.mark.parametrize(
    ("width", "tokens", "expected"),
    [
        (4096, 1, (16, None, True)),
        (4096, 132, (16, None, True)),
        (4096, 133, (16, 64, False)),
        (4096, 528, (16, 64, False)),
        (4096, 529, (16, 40, False)),
        (2048, 264, (8, None, True)),
        (2048, 265, (8, 64, False)),
        (8192, 8192, (16, 64, False)),
        (576, 8192, (1, None, True)),
    ],
)
def test_how_a_boundary_is_launched(width, tokens, expected, monkeypatch):
    monkeypatch.setattr(launch, "_multiprocessors", lambda: 132)
    chosen = launch.choose_launch(width, tokens, 8192)
    assert (chosen.warps, chosen.registers, chosen.simple) == expected
    assert chosen.ahead == (chosen.registers != 40 and (width < 8192 or tokens == 1))
    assert chosen.early <= (tokens <= 32)
    # Else a token's bits would depend on who else is in its batch.
    assert chosen.warps == launch.choose_launch(width, 1, 8192).warps
