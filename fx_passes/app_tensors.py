"""An app's tensors: which ones a function needs, their checks, and their JSON form."""

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.kernels import FIELDS, TENSOR_FIELDS, Kind, is_own_op
from eyesplice.fx_passes.plain import join, suggestion

MAX_TENSOR_BYTES: Final = 4 * 2**30
"""Bytes of all tensors of one app."""

DTYPES: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_AXES: Final = {
    ("write", "affine", "u"): "Rw",
    ("write", "affine", "v"): "Rw",
    ("write", "affine", "bias"): "R",
    ("read", "sae", "weight"): "Fw",
    ("read", "sae", "bias"): "F",
}
"""Axes of the tensors that are not one row, a letter each: w the site's width, R a
rank, F features. A per-layer tensor has one axis more in front."""

HOLDERS: Final = (*TENSOR_FIELDS, "bias")
"""The fields that may name a tensor, or in Python hold one."""


def check_tensor(name: str, tensor: object) -> Tensor:
    """The app's own copy of a tensor: contiguous, on the CPU.

    Raises:
        SpecError: not a dense float tensor of 1 to 3 axes with finite values.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        _refuse(name, type(tensor).__name__ + " (not a dense tensor)")
    if tensor.is_nested or tensor.device.type == "meta":
        _refuse(name, "a tensor without values of its own")
    shown = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.dtype not in DTYPES.values() or not 1 <= tensor.dim() <= 3:
        _refuse(name, shown)
    if not 0 < tensor.numel() * tensor.itemsize <= MAX_TENSOR_BYTES:
        _refuse(name, shown)
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    if not copy.isfinite().all():
        raise SpecError(f"tensor {name}", "NaN or Inf", "finite values", "make it anew")
    return copy


def _refuse(name: str, shown: str) -> NoReturn:
    raise SpecError(
        f"tensor {name}",
        shown,
        f"a dense tensor of {', '.join(DTYPES)}, not empty, of at most 3 axes and "
        f"{MAX_TENSOR_BYTES} bytes",
        "store the tensor in that form",
    )


def digest(tensor: Tensor) -> str:
    """Hash of a contiguous CPU tensor's dtype, shape and values: "sha256:..."."""
    found = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    found.update(tensor.view(torch.uint8).numpy().data)
    return "sha256:" + found.hexdigest()


def tensor_fields(kind: Kind, kernel: str) -> tuple[str, ...]:
    """The fields that must name a tensor; an op of the user's own need not have one."""
    return tuple(f for f in FIELDS[kind].get(kernel, ()) if f in TENSOR_FIELDS)


def check_uses(
    entry: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str
) -> None:
    """Refuse a function whose tensors are missing or do not fit one another.

    Args:
        entry: a YAML function with its tensors' names filled in.
        tensors: the app's tensors by name.
        path: where the function stands, for the error.

    Raises:
        SpecError: a missing tensor, too few or many axes, or sizes that differ.
    """
    kind: Kind = "read" if "read" in entry else "write"
    sizes: dict[str, tuple[int, str]] = {}
    for field in HOLDERS:
        name = entry.get(field)
        if not isinstance(name, str):
            continue
        axes = _AXES.get((kind, entry[kind], field), "w")
        if is_own_op(entry[kind]):
            axes = "w" if _find(name, tensors, join(path, field)).dim() == 1 else "Rw"
        if field == "bias" and axes == "w":
            _refuse_bias(name, entry[kind], path)
        shape = list(_find(name, tensors, join(path, field)).shape)
        if len(shape) not in (len(axes), len(axes) + 1):
            _misfit(path, field, name, shape, axes)
        letters = axes if len(shape) == len(axes) else "L" + axes
        for letter, size in zip(letters, shape, strict=True):
            known, other = sizes.setdefault(letter, (size, field))
            if known != size:
                _misfit(path, field, name, shape, axes, f"as {other} has: {known}")


def _find(name: str, tensors: Mapping[str, Tensor], path: str) -> Tensor:
    if name in tensors:
        return tensors[name]
    raise SpecError(
        path,
        name,
        f"a tensor of the app: {', '.join(sorted(tensors)[:20]) or 'it has none'}",
        suggestion(name, tensors, "add the tensor"),
    )


def _refuse_bias(name: str, kernel: str, path: str) -> NoReturn:
    raise SpecError(
        join(path, "bias"), name, f"a number for {kernel}", "give bias as a number"
    )


def _misfit(
    path: str, field: str, name: str, shape: list[int], axes: str, more: str = ""
) -> NoReturn:
    meaning = {"w": "the site's width", "R": "rank", "F": "features"}
    spelt = ", ".join(meaning[letter] for letter in axes)
    raise SpecError(
        join(path, field),
        f"{name} of shape {shape}",
        f"[{spelt}] or [layers, {spelt}] {more}".rstrip(),
        "use tensors that fit the function and one another",
    )


def encode(tensor: Tensor) -> dict[str, Any]:
    """A tensor as JSON: dtype, shape and base64 of its bytes, little-endian."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(tensor.view(torch.uint8).numpy().data).decode(),
    }


def decode(name: str, value: object) -> Tensor:
    """The tensor that `encode` wrote.

    Raises:
        SpecError: another object, or data that does not fill the shape.
    """
    if isinstance(value, dict) and set(value) == {"dtype", "shape", "data"}:
        dtype, shape, data = value["dtype"], value["shape"], value["data"]
        known = DTYPES.get(dtype) if isinstance(dtype, str) else None
        if known is not None and is_shape(shape) and isinstance(data, str):
            size = math.prod(shape) * known.itemsize
            if size <= MAX_TENSOR_BYTES and len(data) == 4 * math.ceil(size / 3):
                return _from_base64(name, known, shape, data)
    raise SpecError(
        f"tensor {name}",
        value,
        f'{{"dtype": {" or ".join(DTYPES)}, "shape": [sizes], "data": base64}}, with '
        f"as much data as the shape asks for, at most {MAX_TENSOR_BYTES} bytes",
        "encode the tensor again",
    )


def _from_base64(name: str, dtype: torch.dtype, shape: list[int], data: str) -> Tensor:
    try:
        raw = bytearray(base64.b64decode(data, validate=True))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)
    except (binascii.Error, ValueError, RuntimeError) as error:
        raise SpecError(
            f"tensor {name}", data, f"base64 text ({error})", "encode it again"
        ) from None


def is_shape(value: object) -> bool:
    """Whether a value is 1 to 3 sizes, none 0."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= 3
        and all(type(size) is int and 0 < size < 2**40 for size in value)
    )
