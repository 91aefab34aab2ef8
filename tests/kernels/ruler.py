"""The formulas in float64, from entries as they are before packing.

A `Value` also carries its size: the same formula on absolute values, which bounds every
partial result of a low-precision evaluation.
"""

from typing import NamedTuple

import torch

from eyesplice.ops import reference
from eyesplice.ops.inputs import Case
from eyesplice.ops.layout import PRESERVE_NORM, Function, Opcode, Stage
from eyesplice.ops.token_map import ROW_MASK
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
    words, select = (table[: exact.shape[0]] for table in case.tables[:2])
    rows = words & ROW_MASK
    for row, program in enumerate(case.programs, start=1):
        for entry in program:
            at = (rows == row) & ((select & entry.clause_mask) != 0)
            if entry.stage == stage and entry.opcode != Opcode.NONE:
                after = write(Value(exact[at], size[at]), entry, case.bank)
                exact[at], size[at] = after
    return Value(exact, size)


def write(h: Value, entry, bank) -> Value:
    """One entry that writes, on rows of h."""
    if entry.opcode == Opcode.ROUTER:
        after = _router(h, entry, bank)
    else:
        change = _change(h, entry, bank)
        after = Value(h.exact + change.exact, h.size + change.size)
    if not entry.flags & PRESERVE_NORM:
        return after
    lengths = [value.exact.norm(dim=-1, keepdim=True) for value in (h, after)]
    spread = sum(
        (value.size * value.exact.abs()).sum(dim=-1, keepdim=True) / length.square()
        for value, length in zip((h, after), lengths, strict=True)
    )
    ratio = lengths[0] / lengths[1]
    return Value(
        after.exact * ratio, (after.size + after.exact.abs() * (1 + spread)) * ratio
    )


def _change(h: Value, entry, bank) -> Value:
    width = h.exact.shape[1]
    u = bank[entry.u, :width].double()
    gain = abs(entry.gain)
    match entry.opcode:
        case Opcode.ADD:
            return Value((entry.gain * u).expand_as(h.exact), gain * u.abs())
        case Opcode.REPLACE:
            return Value(entry.gain * (u - h.exact), gain * (u.abs() + h.size))
        case Opcode.MASK:
            return Value(entry.gain * h.exact * u, gain * h.size * u.abs())
    exact, size = torch.zeros_like(h.exact), torch.zeros_like(h.exact)
    for r in range(entry.rank if entry.opcode == Opcode.AFFINE else 1):
        bias = entry.bias
        if entry.opcode == Opcode.AFFINE:
            bias = float(bank[entry.bias_row, r]) if entry.bias_row else 0.0
        u = bank[entry.u + r, :width].double()
        f, spread = _projection(h, entry, bank[entry.v + r, :width].double(), bias)
        exact += entry.gain * torch.outer(f, u)
        size += gain * torch.outer(f.abs() + spread, u.abs())
    return Value(exact, size)


def _projection(h: Value, entry, v, bias):
    """(f, size of what f was computed from)."""
    p = entry.in_scale * (h.exact @ v) + bias
    spread = abs(entry.in_scale) * (h.size @ v.abs()) + abs(bias)
    jump = {Function.STEP: 0.0, Function.TOWARD_VALUE: entry.hi}.get(entry.function)
    if jump is not None:
        # A step has no slope: this close to it either side is right.
        near = (p - jump).abs() < 1e-5 * (spread + abs(jump))
        spread = torch.where(near, FREE, spread)
    return _function(entry.function, p, entry.lo, entry.hi), spread


def _router(h: Value, entry, bank) -> Value:
    z = h.exact - h.exact.amax(dim=-1, keepdim=True)
    s = z - z.exp().sum(dim=-1, keepdim=True).log()
    u = bank[entry.u, : s.shape[1]].double()
    high = s.amax(dim=-1, keepdim=True) + entry.gain
    low = s.amin(dim=-1, keepdim=True) - entry.gain
    exact = torch.where(u > 0, high, torch.where(u < 0, low, s))
    largest = h.size.amax(dim=-1, keepdim=True)
    return Value(exact, 3 * largest + s.abs() + abs(entry.gain) + torch.zeros_like(s))


def _function(function, p, lo, hi):
    clipped = torch.where(p < lo, lo, torch.where(p > hi, hi, p))
    return {
        Function.IDENTITY: p,
        Function.RELU: p * (p > 0),
        Function.SIGMOID: 1 / (1 + torch.exp(-p)),
        Function.STEP: (p >= 0).double(),
        Function.CLIP: clipped,
        Function.TOWARD_CLIP: clipped - p,
        Function.TOWARD_VALUE: torch.where(p > hi, lo - p, lo),
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
