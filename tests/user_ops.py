"""Ops as a user writes them, good and bad: what `op_modules` names in tests.

bend   value[t] += gain[t] * tanh(value[t] @ weight.T) @ weight
drift  value[t] += gain[t], an op without a tensor
"""

import torch
from torch import Tensor


@torch.library.custom_op("userops::bend", mutates_args={"value"})
def bend(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    chosen = gain != 0
    step = torch.tanh(value.float() @ weight.float().T) @ weight.float()
    bent = (value.float() + gain[:, None] * step).to(value.dtype)
    value.copy_(torch.where(chosen[:, None], bent, value))


@torch.library.custom_op("userops::drift", mutates_args={"value"})
def drift(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    assert weight.shape == (0, value.shape[1])
    moved = (value.float() + gain[:, None]).to(value.dtype)
    value.copy_(torch.where((gain != 0)[:, None], moved, value))


@torch.library.custom_op("userops::rounds_idle_rows", mutates_args={"value"})
def rounds_idle_rows(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    value.add_(gain[:, None].to(value.dtype)).mul_(1 + 2**-7)


@torch.library.custom_op("userops::cleans_nan", mutates_args={"value"})
def cleans_nan(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    value.nan_to_num_()


@torch.library.custom_op("userops::mixes_rows", mutates_args={"value"})
def mixes_rows(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    mixed = (value + gain[:, None] * value.mean(dim=0)).nan_to_num().to(value.dtype)
    value.copy_(torch.where((gain != 0)[:, None], mixed, value))


@torch.library.custom_op("userops::adds_zeros", mutates_args={"value"})
def adds_zeros(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    value.add_((gain[:, None] * weight[0].float().abs()).to(value.dtype))


@torch.library.custom_op("userops::writes_gain", mutates_args={"value"})
def writes_gain(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    gain.mul_(2)


@torch.library.custom_op("userops::writes_beside", mutates_args={"value"})
def writes_beside(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    shape, first = (1, value.shape[1]), value.storage_offset() + value.numel()
    value.as_strided(shape, value.stride(), first).zero_()


@torch.library.custom_op("userops::fails", mutates_args={"value"})
def fails(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    raise RuntimeError("no such luck")


_library = torch.library.Library("userops", "FRAGMENT")
_library.define("functional(Tensor value, Tensor gain, Tensor weight) -> Tensor")
_library.define("no_mutation(Tensor value, Tensor gain, Tensor weight) -> ()")
_library.define("too_much(Tensor(a!) value, Tensor(b!) gain, Tensor weight) -> ()")
_library.define("four(Tensor(a!) value, Tensor gain, Tensor weight, int n) -> ()")
_library.define("renamed(Tensor(a!) x, Tensor gain, Tensor weight) -> ()")
_library.define("default(Tensor(a!) value, Tensor gain, Tensor? weight=None) -> ()")
_library.define("keyword(Tensor(a!) value, Tensor gain, *, Tensor weight) -> ()")
_library.define("bad_fake(Tensor(a!) value, Tensor gain, Tensor weight) -> ()")


def _fake(value: Tensor, gain: Tensor, weight: Tensor) -> None:
    raise RuntimeError("cannot trace this")


_library._register_fake("bad_fake", _fake)
