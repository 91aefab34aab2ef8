"""Each write alone against its formula, and what a program may leave out."""

import dataclasses

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import Entry, guarded, pack_programs, random_case
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    PRESERVE_NORM,
    Family,
    Function,
    Opcode,
    Stage,
)
from tests.kernels import ruler

ON_GPU = torch.cuda.is_available()
IMPLEMENTATIONS = {"kernel": launch, "reference": reference}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
S = Stage.STREAM


def entry(opcode, **fields):
    return Entry(
        opcode, S, **({"u": 6, "v": 6, "gain": 0.7, "in_scale": 0.05} | fields)
    )


ENTRIES = {
    "add": entry(Opcode.ADD),
    "rank 1": entry(Opcode.RANK1, v=1, bias=0.1),
    "toward value": entry(
        Opcode.RANK1, function=Function.TOWARD_VALUE, lo=-0.3, hi=0.2, bias=0.1
    ),
    "affine": entry(Opcode.AFFINE, rank=3, bias_row=1, function=Function.SIGMOID),
    "affine without bias": entry(Opcode.AFFINE, rank=2, bias=torch.nan, gain=-0.4),
    "affine of rank 1": entry(Opcode.AFFINE, u=8, v=8, rank=1, function=Function.RELU),
    "affine of rank 0": entry(Opcode.AFFINE, rank=0),
    "replace": entry(Opcode.REPLACE, gain=0.3),
    "replace all": entry(Opcode.REPLACE, gain=1.0),
    "mask": entry(Opcode.MASK, gain=-1.0),
    "router": entry(Opcode.ROUTER, gain=0.01),
}


def case_of(entries, num_tokens, width, dtype, device, **options):
    """Rows 0 and 1 in turn, row 1 with these entries."""
    case = random_case(num_tokens, width, dtype, device=device, num_programs=1, seed=21)
    program = pack_programs([entries], 1 + len(entries)).to(device)
    # Activate some, deactivate some: the mask of a router.
    case.bank[6, : width // 3] = 0.0
    return dataclasses.replace(
        case, programs=(tuple(entries),), program=program, **options
    )


def run(ops, case):
    value = guarded(case.stream)
    ops.inline_(value.tensor, int(S), *case.tables)
    assert value.intact()
    return value.tensor


def check(case):
    low = run(reference, case)
    exact = ruler.run(ruler.of(case.stream), case, S)
    ruler.assert_within("value", run(launch, case), exact, low)
    size = exact.size.clamp(max=1e6)
    unit = 2 * torch.finfo(low.dtype).eps
    assert ((low.double() - exact.exact).abs() <= unit * size + 1e-5 * size).all()


@pytest.mark.parametrize("keep_norm", [False, True], ids=["", "norm kept"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ENTRIES)
def test_formula(name, dtype, keep_norm, device):
    flags = PRESERVE_NORM * keep_norm
    entries = [dataclasses.replace(ENTRIES[name], flags=flags)]
    check(case_of(entries, 5, 90, dtype, device))


@pytest.mark.parametrize("width", [8, 60, 128, 1536] + [4096, 8192] * ON_GPU)
@pytest.mark.parametrize("name", ["affine", "replace", "mask", "router"])
def test_widths(name, width, device):
    check(case_of([ENTRIES[name]], 63 if ON_GPU else 5, width, torch.float32, device))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_length_is_kept(name, device):
    entries = [dataclasses.replace(ENTRIES["add"], gain=9.0, flags=PRESERVE_NORM)]
    case = case_of(entries, 4, 90, torch.float32, device)
    case.token_map[:4] = 1
    value = run(IMPLEMENTATIONS[name], case)
    assert not torch.equal(value, case.stream)
    torch.testing.assert_close(value.norm(dim=1), case.stream.norm(dim=1))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_vector_of_no_length_stays_zero(name, device):
    entries = [dataclasses.replace(ENTRIES["mask"], gain=-1.0, flags=PRESERVE_NORM)]
    case = case_of(entries, 2, 90, torch.float32, device)
    case.token_map[:2] = 1
    case.bank[6] = 1.0
    assert not run(IMPLEMENTATIONS[name], case).any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_router_logits_keep_the_order_of_the_others(name, device):
    """The activated are above all, the deactivated below all, the others a softmax."""
    case = case_of([ENTRIES["router"]], 2, 60, torch.float32, device)
    case.token_map[:2] = 1
    case.bank[6, :60] = 0.0
    case.bank[6, 3:5], case.bank[6, 7:9] = 1.0, -1.0
    value = run(IMPLEMENTATIONS[name], case)
    s = case.stream.log_softmax(dim=1)
    exact = s.clone()
    exact[:, 3:5] = s.amax(dim=1, keepdim=True) + 0.01
    exact[:, 7:9] = s.amin(dim=1, keepdim=True) - 0.01
    torch.testing.assert_close(value, exact)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("missing", [f for f in Family if f <= Family.ROUTER])
def test_a_family_left_out_leaves_the_others(missing, name, device):
    families = ALL_FAMILIES & ~missing
    names = ["affine", "replace", "rank 1", "mask", "add", "router"]
    entries = [
        dataclasses.replace(ENTRIES[n], counter=i + 1) for i, n in enumerate(names)
    ]
    case = case_of(entries, 4, 90, torch.float32, device, families=families)
    case.work.counts.zero_()
    case.work.slot_of_token.fill_(1)
    value = run(IMPLEMENTATIONS[name], case)
    kept = [e for e in entries if Family[e.opcode.name] != missing]
    less = dataclasses.replace(case, programs=(tuple(kept),))
    exact = ruler.run(ruler.of(case.stream), less, S)
    ruler.assert_within("value", value, exact, value)
    assert ((value.double() - exact.exact).abs() <= 1e-5 * exact.size).all()
    counted = case.work.counts[1, 0, : len(names)].tolist()
    assert counted == [2 * (e in kept) for e in entries]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_norm_is_not_kept_without_its_family(name, device):
    flagged = dataclasses.replace(ENTRIES["add"], flags=PRESERVE_NORM)
    families = ALL_FAMILIES & ~Family.PRESERVE_NORM
    case = case_of([flagged], 2, 90, torch.float32, device, families=families)
    plain = case_of([ENTRIES["add"]], 2, 90, torch.float32, device)
    ops = IMPLEMENTATIONS[name]
    assert torch.equal(run(ops, case), run(ops, plain))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_counts_are_of_tokens_and_requests(name, device):
    """Bit 3 is the condition, bit 4 the condition and the gate."""
    when, both = 1 << 3, 1 << 4
    entries = [
        entry(Opcode.ADD, clause_mask=both, bit=when, counter=256),
        entry(Opcode.MASK, clause_mask=when, counter=2),
        entry(Opcode.ADD, clause_mask=both, bit=when),
    ]
    case = case_of(entries, 40, 8, torch.float32, device)
    case.token_map[:40] = 1
    case.token_map[30:40] = 0
    case.work.counts.zero_()
    case.work.slot_of_token.copy_(torch.arange(47) % 2)
    select = [(when * (i % 3 == 0)) | (both * (i % 6 == 0)) for i in range(40)]
    case.select[:40] = torch.tensor(select)
    run(IMPLEMENTATIONS[name], case)
    expected = torch.zeros(2, 2, 256, dtype=torch.int32)
    for i in range(30):
        expected[i % 2, 0, 255] += i % 6 == 0
        expected[i % 2, 1, 255] += i % 3 == 0
        expected[i % 2, 0, 1] += i % 3 == 0
    assert torch.equal(case.work.counts.cpu(), expected)
