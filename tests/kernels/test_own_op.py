"""The documented Triton op: its formula, and its contract as a start would check it."""

import sys
from pathlib import Path

import pytest
import torch

from eyesplice.fx_passes.custom_ops import verify

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from squash import squash


@pytest.mark.parametrize("width", [1, 60, 128, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_squashes_along_the_direction(width, dtype, device):
    generator = torch.Generator().manual_seed(width)
    value = (3 * torch.randn(63, width, generator=generator)).to(dtype)
    weight = torch.randn(2, width, generator=generator).to(dtype)
    gain = (torch.arange(63) % 3) / 2
    unit = weight[0].double() / weight[0].double().norm()
    p = value.double() @ unit
    expected = value.double() + torch.outer(gain.double() * (p.tanh() - p), unit)
    found = value.clone().to(device)
    squash(found, gain.to(device), weight.to(device))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(
        found.cpu().double(), expected, rtol=tolerance, atol=tolerance
    )
    assert torch.equal(found.cpu()[gain == 0], value[gain == 0])


def test_it_keeps_the_contract(device):
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(1, 100).to(device, dtype)
        verify("mylib::squash", weight, dtype)
