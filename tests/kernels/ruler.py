"""The formulas in float64, from entries as they are before packing.

A `Value` also carries its size: the same formula on absolute values, which bounds every
partial result of a low-precision evaluation.
"""

from typing import NamedTuple

import torch

from eyesplice.ops import reference
from eyesplice.ops.inputs import Case
from eyesplice.ops.layout import Function, Opcode, Stage
from eyesplice.ops.tolerances import INTERPRETED, ROUNDING, error_bound

FREE = 1e30
"""A size that allows any finite result."""


class Value(NamedTuple):
    exact: torch.Tensor
    size: torch.Tensor


class Boundary(NamedTuple):
    stream: Value
    normed: Value


def of(tensor):
    exact = tensor.double()
    return Value(exact, exact.abs())


def boundary(case: Case) -> Boundary:
    """h and y of `boundary_`."""
    h = of(case.stream)
    if case.branch is not None:
        x = run(of(case.branch), case, Stage.BRANCH)
        h = Value(h.exact + x.exact, h.size + x.size)
    h = run(h, case, Stage.STREAM)
    mean_square = h.exact.square().mean(dim=-1, keepdim=True) + case.eps
    weight = case.weight.double() + case.weight_offset
    y = h.exact / mean_square.sqrt() * weight
    spread = (h.size * h.exact.abs()).mean(dim=-1, keepdim=True) / mean_square
    size = h.size / mean_square.sqrt() * weight.abs() + y.abs() * (1 + spread)
    return Boundary(h, run(Value(y, size), case, Stage.NORMED))


def run(value: Value, case: Case, stage: Stage) -> Value:
    """The entries of one stage, for all tokens of a program at once."""
    exact, size = value.exact.clone(), value.size.clone()
    rows, select = (table[: exact.shape[0]] for table in case.tables[:2])
    for row, program in enumerate(case.programs, start=1):
        for entry in program:
            at = (rows == row) & ((select & entry.clause_mask) != 0)
            if entry.stage == stage and entry.opcode != Opcode.NONE:
                change = _change(Value(exact[at], size[at]), entry, case.bank)
                exact[at] += change.exact
                size[at] += change.size
    return Value(exact, size)


def _change(h: Value, entry, bank) -> Value:
    width = h.exact.shape[1]
    u = bank[entry.u, :width].double()
    if entry.opcode == Opcode.ADD:
        return Value(entry.gain * u, abs(entry.gain) * u.abs())
    v = bank[entry.v, :width].double()
    p = entry.in_scale * (h.exact @ v) + entry.bias
    spread = abs(entry.in_scale) * (h.size @ v.abs()) + abs(entry.bias)
    if entry.function == Function.STEP:
        # A step has no slope: this close to it either side is right.
        spread = torch.where(p.abs() < 1e-5 * spread, FREE, 0.0)
    f = _function(entry.function, p, entry.lo, entry.hi)
    return Value(
        entry.gain * torch.outer(f, u),
        abs(entry.gain) * torch.outer(f.abs() + spread, u.abs()),
    )


def _function(function, p, lo, hi):
    clipped = torch.where(p < lo, lo, torch.where(p > hi, hi, p))
    return {
        Function.IDENTITY: p,
        Function.RELU: p * (p > 0),
        Function.SIGMOID: 1 / (1 + torch.exp(-p)),
        Function.STEP: (p >= 0).double(),
        Function.CLIP: clipped,
        Function.TOWARD_CLIP: clipped - p,
    }[function]


def reference_boundary(case: Case):
    """(h, y) of the reference, its inputs left alone."""
    stream = case.stream.clone()
    normed = reference.boundary_(
        stream,
        None if case.branch is None else case.branch.clone(),
        case.weight,
        case.weight_offset,
        case.eps,
        *case.tables,
    )
    return stream, normed


def assert_within(name, result, value: Value, low, roundings=1):
    """Every element of `result` is within its bound."""
    table = ROUNDING if result.is_cuda else INTERPRETED
    rounding = table[result.dtype]
    bound = error_bound(
        value.exact, value.size, low, rounding=rounding, roundings=roundings
    )
    error = (result.double() - value.exact).abs()
    worst = int((error - bound).nan_to_num(nan=torch.inf).argmax())
    token, column = divmod(worst, result.shape[1])
    assert bool((error <= bound).all()), (
        f"{name}[{token}, {column}] = {float(result[token, column])}, exact "
        f"{float(value.exact[token, column])}, error {float(error[token, column])} over "
        f"{float(bound[token, column])}; see eyesplice.ops.tolerances ({rounding})"
    )
