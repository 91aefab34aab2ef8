"""Bounds on what writes can do to activations.

A NaN in the KV cache outlives its request: attention multiplies stale rows of a partly
filled block by a weight of 0, and 0 times NaN is NaN, in whatever request has the block
next. So a request whose writes could add, or multiply by, more than the limits is refused;
within them the squares and products that a layer forms stay far inside fp32.

With s the scale, a write changes the length |h| of a value to at most

    kernel           growth * |h|                         + added
    steering_vector                                         |s| |v|
    ablate           max(1, |1 - s|)
    clamp            max(1, |1 - s|)                        |s| max(|lo|, |hi|)
    one_sided        max(1, |1 - s|)                        |s| |offset|
    replace          |1 - s|                                |s| |v|
    mask             max_i |1 + s v_i|
    feature_clamp    the norm of I - s v w^T, or 1          |s| (|value| + |bias|) |v|
    affine           identity: the norm of I + s U^T V      |s| |U| |bias|
                     relu: 1 + |s| |U| |V|                  |s| |U| |bias|
                     sigmoid, step: 1                       |s| sum_r |u_r|
    router           its result is a log-softmax, but for epsilon
    lib::op          not known: the operator answers for it

|U| is the largest singular value. Growth below 1 counts as 1. A write that preserves the
norm is held to the same bounds, since its result exists before it is scaled back.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.kernels import is_own_op
from eyesplice.fx_passes.tensors import Form, digests, values
from eyesplice.fx_passes.writes import Write

_MAX_ADDED: Final = 1e8
_MAX_GROWTH: Final = 1e6

_MAX_REMEMBERED: Final = 2**16
_BOUNDS: Final[dict[tuple[object, ...], tuple[float, float]]] = {}


def refuse_overflow(writes: Sequence[tuple[str, Write]], context: Context) -> None:
    """Refuse writes that could make activations overflow.

    Args:
        writes: each with what errors call it.
        context: what the model offers.

    Raises:
        SpecError: the first write with which the limits are passed.
    """
    added, growth = 0.0, 1.0
    for path, write in writes:
        for layer in write.layers:
            more, factor = _remembered(write, layer, context)
            added += more
            growth *= max(1.0, factor)
            if added > _MAX_ADDED or growth > _MAX_GROWTH:
                field = "epsilon" if write.kernel == "router" else "scale"
                raise SpecError(
                    f"{path}.{field}",
                    getattr(write, field),
                    f"writes that add at most {_MAX_ADDED:g} in all (lengths of the "
                    f"scaled vectors) and multiply by at most {_MAX_GROWTH:g}",
                    "use a smaller scale or fewer layers",
                )


def _remembered(write: Write, layer: int, context: Context) -> tuple[float, float]:
    """What `_bounds` finds, computed once for each content of the tensors.

    The engine's loop lowers every request: it has no time for decompositions.
    """
    if write.kernel not in ("affine", "feature_clamp", "mask"):
        return _bounds(write, layer, context)
    contents = digests(context.vectors, set(write.tensors))
    own = (write.scale, write.function, write.bias, write.value)
    key = (write.kernel, write.tensors, *contents.values(), layer, *own)
    if key not in _BOUNDS:
        if len(_BOUNDS) == _MAX_REMEMBERED:
            _BOUNDS.clear()
        _BOUNDS[key] = _bounds(write, layer, context)
    return _BOUNDS[key]


def _bounds(write: Write, layer: int, context: Context) -> tuple[float, float]:
    """The most that a write adds to a length, and multiplies it by."""

    def tensor(name: str | None, form: Form = "vector") -> Tensor:
        assert name is not None
        return values(context.vectors, name, form, layer)

    scale = write.scale
    match write.kernel:
        case "steering_vector" | "replace":
            assert write.vector is not None
            squared = context.vectors.squared_norm(write.vector, layer)
            factor = 1.0 if write.kernel == "steering_vector" else abs(1.0 - scale)
            return abs(scale) * math.sqrt(squared), factor
        case "mask":
            return 0.0, float((1.0 + scale * tensor(write.vector)).abs().max())
        case "router":
            return write.epsilon or 0.0, 1.0
        case kernel if is_own_op(kernel):
            return 0.0, 1.0
        case "feature_clamp":
            decoder, encoder = tensor(write.vector), tensor(write.weight)
            reach = abs(write.value or 0.0) + abs(float(write.bias or 0.0))
            return (
                abs(scale) * reach * float(decoder.norm()),
                _norm_of_sum(-scale, decoder[None], encoder[None]),
            )
        case "affine":
            u, v = tensor(write.u, "rows"), tensor(write.v, "rows")
            biased = isinstance(write.bias, str)
            bias = tensor(str(write.bias), "numbers") if biased else torch.zeros(1)
            return _affine_bounds(scale, write.function, u, v, float(bias.norm()))
    bounds = [abs(b) for b in (write.lo, write.hi, write.offset) if b is not None]
    return abs(scale) * max(bounds, default=0.0), abs(1.0 - scale)


def _affine_bounds(
    scale: float, function: str | None, u: Tensor, v: Tensor, bias: float
) -> tuple[float, float]:
    if function in ("sigmoid", "step"):
        return abs(scale) * float(u.norm(dim=-1).sum()), 1.0
    reach = abs(scale) * _norm(u)
    if function == "relu":
        return reach * bias, 1.0 + reach * _norm(v)
    return reach * bias, _norm_of_sum(scale, u, v)


def _norm(rows: Tensor) -> float:
    """The largest singular value of `[rows, width]`."""
    return float(torch.linalg.matrix_norm(rows, ord=2))


def _norm_of_sum(scale: float, u: Tensor, v: Tensor) -> float:
    """The largest singular value of I + scale * u^T v; `[rows, width]` each.

    It is the identity but for the span of the rows, where the norm is taken.
    """
    basis, _ = torch.linalg.qr(torch.cat([u, v]).T)
    inside = torch.eye(basis.shape[1], dtype=u.dtype)
    inside += scale * (u @ basis).T @ (v @ basis)
    return float(torch.linalg.matrix_norm(inside, ord=2))
