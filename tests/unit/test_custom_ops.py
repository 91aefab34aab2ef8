"""A user's own op: found or refused by its schema, held to its contract by running it."""

import pytest
import torch

from eyesplice import SpecError
from eyesplice.fx_passes.custom_ops import find_op, schema_of, verify
from tests import user_ops

WEIGHT = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_op_that_keeps_the_contract_is_taken(dtype):
    verify("userops::bend", WEIGHT.to(dtype), dtype)
    verify("userops::drift", torch.empty(0, 8, dtype=dtype), dtype)


def test_the_op_is_the_registered_one():
    op = find_op("userops::bend")
    value = torch.randn(3, 8)
    expected = value + 2 * torch.tanh(value @ WEIGHT.T) @ WEIGHT
    expected[1] = value[1]
    op(value, torch.tensor([2.0, 0.0, 2.0]), WEIGHT)
    torch.testing.assert_close(value, expected)
    assert user_ops.bend._opoverload is op
    assert schema_of("userops::bend").startswith("userops::bend(Tensor(")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("userops::functional", "functional"),
        ("userops::no_mutation", "no_mutation"),
        ("userops::too_much", "too_much"),
        ("userops::four", "four"),
        ("userops::renamed", "renamed"),
        ("userops::default", "default"),
        ("userops::keyword", "keyword"),
        ("aten::add_", "overloads"),
        ("userops::bad_fake", "cannot trace this"),
        ("userops::bends", r"bend, .*write userops::bend \(did you mean"),
        ("nolibrary::op", "there is nothing.*`op_modules`"),
    ],
)
def test_an_op_that_cannot_be_one_is_refused_by_name(name, said):
    with pytest.raises(SpecError, match=said) as refused:
        find_op(name)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("op", "did"),
    [
        ("rounds_idle_rows", "changes rows whose gain is 0"),
        ("cleans_nan", "changes rows whose gain is 0"),
        ("adds_zeros", "changes rows whose gain is 0"),
        ("mixes_rows", "other tokens hold NaN"),
        ("writes_gain", "writes to gain or weight"),
        ("writes_beside", "memory beside `value`"),
        ("fails", "no such luck"),
    ],
)
def test_an_op_that_breaks_the_contract_is_refused_by_name(op, did):
    with pytest.raises(SpecError, match=did) as refused:
        verify(f"userops::{op}", WEIGHT, torch.float32)
    assert f"userops::{op}" in str(refused.value)
