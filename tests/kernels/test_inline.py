import dataclasses

import pytest
import torch

from eyesplice.ops import launch, reference
from eyesplice.ops.inputs import guarded, random_case
from eyesplice.ops.layout import Header, Stage
from tests.kernels import ruler

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (
    [(t, w) for w in (8, 576, 1536, 4096, 8192) for t in (1, 63, 100, 2000)]
    if ON_GPU
    else [(1, 576), (63, 576), (100, 8), (7, 4096), (7, 8192)]
)


def run(case, stage):
    value = guarded(case.stream)
    launch.inline_(value.tensor, stage, *case.tables)
    assert value.intact()
    return value.tensor


def check(case, stage):
    low = case.stream.clone()
    reference.inline_(low, stage, *case.tables)
    exact = ruler.run(ruler.of(case.stream), case, stage)
    ruler.assert_within("value", run(case, stage), exact, low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_sizes(num_tokens, width, dtype, device):
    case = random_case(num_tokens, width, dtype, seed=11, device=device)
    for stage in Stage:
        check(case, stage)


def test_many_tokens(device):
    case = random_case(2000, 48, torch.float32, device=device)
    case.token_map[30:1980] = 0
    check(case, Stage.STREAM)


def test_idle_tokens_and_other_stages_are_not_written(device):
    case = random_case(12, 96, torch.bfloat16, seed=12, device=device)
    only_stream = tuple(
        tuple(entry for entry in program if entry.stage == Stage.STREAM)
        for program in case.programs
    )
    program = case.program.clone()
    program[:, 0, Stage.BRANCH] = 0
    program[:, 0, Stage.STREAM] = 0
    program[:, 0, Stage.NORMED] = 0
    program[:, 0, Header.WRITES_NORMED] = 0
    case = dataclasses.replace(case, program=program, programs=only_stream)
    for stage in Stage:
        value = run(case, stage)
        assert torch.equal(value.view(torch.int16), case.stream.view(torch.int16))


def test_a_nan_keeps_its_payload_in_an_idle_token(device):
    case = random_case(3, 64, torch.bfloat16, device=device)
    case.token_map[:3] = 0
    case.stream.view(torch.int16).fill_(0x7FA5)
    value = run(case, Stage.BRANCH)
    assert bool((value.view(torch.int16) == 0x7FA5).all())


def test_value_of_another_dtype_than_the_bank(device):
    case = random_case(20, 60, torch.bfloat16, seed=13, device=device)
    case = dataclasses.replace(case, stream=case.stream.float())
    check(case, Stage.STREAM)


def test_elements_apart_are_refused(device):
    case = random_case(4, 32, torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="value"):
        launch.inline_(case.stream.repeat(1, 2)[:, ::2], 0, *case.tables)


def test_no_tokens(device):
    case = random_case(0, 32, torch.bfloat16, device=device)
    assert run(case, Stage.STREAM).shape == (0, 32)
