"""Programs that only add vectors: a path of their own through the boundary kernel."""

import dataclasses

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import Entry, map_words, pack_programs, random_case
from eyesplice.ops.layout import Header, Opcode, Stage
from eyesplice.ops.token_map import ADDS_SHIFT, ROW_MASK
from tests.kernels.test_boundary import DTYPES, check, run, same_bits

LAUNCHES = {
    "together": launch.Launch(4),
    "together, few registers": launch.Launch(4, 64, simple=False),
    "one after another": launch.Launch(4, 40, simple=False, ahead=False),
}
USED = (1, 3, 6, 7, 8)
"""Rows of a random case's bank that are not poison."""


def adding(dtype, device, has_branch=True, width=576, tokens=40):
    """A case whose seven programs add 1 to 7 vectors; every eighth token is idle."""
    case = random_case(
        tokens, width, dtype, seed=11, device=device, has_branch=has_branch
    )
    programs = [
        [
            Entry(
                Opcode.ADD,
                Stage.BRANCH if has_branch and i % 3 == 1 else Stage.STREAM,
                u=USED[(i + count) % 5],
                gain=0.5 - 0.1 * i,
                clause_mask=1 << (i % 3),
            )
            for i in range(count)
        ]
        for count in range(1, 8)
    ]
    rows = [t % 8 for t in range(tokens)]
    case.token_map[:tokens] = map_words(rows, programs)
    return dataclasses.replace(
        case,
        programs=tuple(map(tuple, programs)),
        program=pack_programs(programs, 8).to(device),
    )


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_to_seven_vectors(dtype, has_branch, name, device):
    case = adding(dtype, device, has_branch)
    assert case.program[1:, 0, Header.ADDS].tolist() == list(range(1, 8))
    assert (case.token_map[:8] >> ADDS_SHIFT).tolist() == list(range(8))
    check(case, launch=LAUNCHES[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_launch_has_the_same_bits(dtype, device):
    """Which one runs depends on the batch, and a token's bits must not."""
    case = adding(dtype, device)
    first, *others = (run(case, launch=chosen) for chosen in LAUNCHES.values())
    for other in others:
        assert all(map(same_bits, first, other))


def test_a_word_without_vectors_gives_the_same_numbers(device):
    """A map that names the row alone takes the loop of simple programs."""
    case = adding(torch.float32, device)
    rows = dataclasses.replace(case, token_map=case.token_map & ROW_MASK)
    for value, other in zip(run(case), run(rows), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAUNCHES)
def test_clauses_that_do_not_hold_leave_zeros_their_signs(name, device):
    case = adding(torch.float32, device, has_branch=False)
    case.select.zero_()
    case.stream[:, ::2] = -0.0
    idle = dataclasses.replace(case, token_map=torch.zeros_like(case.token_map))
    chosen = LAUNCHES[name]
    pairs = zip(run(case, launch=chosen), run(idle, launch=chosen), strict=True)
    assert all(same_bits(value, alone) for value, alone in pairs)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("pending", [False, True])
def test_deferred_adds(pending, name, device):
    """Active tokens hand h on in the stream with a branch of zeros, idle ones nothing."""
    case = adding(torch.bfloat16, device)
    head = case.weight, case.weight_offset, case.eps
    more = torch.randn_like(case.stream) if pending else None
    kept, found = [], []
    for where, into in (("cpu", kept), (device, found)):
        stream, branch = case.stream.clone().to(where), case.branch.clone().to(where)
        tables = [
            [t.to(where) for t in part]
            if isinstance(part, list)
            else part.to(where)
            if isinstance(part, torch.Tensor)
            else part
            for part in case.tables
        ]
        weight, *numbers = head
        op, options = reference.boundary_, {}
        if into is found:
            op, options = launch.boundary_, {"launch": LAUNCHES[name]}
        late = more.to(where) if more is not None else None
        args = (stream, branch, weight.to(where), *numbers, *tables, late, True)
        into += [op(*args, **options).cpu(), stream.cpu(), branch.cpu()]
    for value, expected in zip(found, kept, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)
    active = torch.arange(40) % 8 != 0
    assert not found[2][active].any()
    assert same_bits(found[1][~active], case.stream.cpu()[~active])
    assert same_bits(found[2][~active], case.branch.cpu()[~active])
