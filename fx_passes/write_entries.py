"""The entry of a write at one layer.

With v, u and w tensors as the bank stores them, each write is one entry per layer:

    kernel           opcode   f             in_scale  bias     gain
    steering_vector  ADD                                       scale
    ablate           RANK1    identity      1         0        -scale / |v|^2
    clamp            RANK1    toward clip   1 / |v|   0        scale / |v|
    one_sided        RANK1    relu          1 / |v|   -offset  -scale / |v|
    feature_clamp    RANK1    toward value  1         bias     scale
    affine           AFFINE   function      1                  scale
    replace          REPLACE                                   scale
    mask             MASK                                      scale
    router           ROUTER                                    epsilon
    lib::op          CUSTOM                                    scale
"""

import math
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.kernels import is_own_op
from eyesplice.fx_passes.program import FLOAT32_LIMIT, Entry
from eyesplice.fx_passes.sites import Site
from eyesplice.fx_passes.writes import Write
from eyesplice.ops.layout import PRESERVE_NORM, Function, Opcode

_MIN_NORM: Final = 1e-18
_MAX_NORM: Final = 1e18
"""Between these, 1 / |v|^2 is a normal fp32 number."""

_ADDED: Final = {
    "steering_vector": Opcode.ADD,
    "replace": Opcode.REPLACE,
    "mask": Opcode.MASK,
}


def write_entry(write: Write, site: Site, context: Context, **gating: Any) -> Entry:
    """The entry of a write at one of its sites.

    Args:
        write: parsed with the same context.
        site: where.
        context: what the model offers.
        gating: `clause_mask`, `bit` and `counter` of the entry.

    Raises:
        SpecError: a tensor whose norm the kernel cannot divide by, a number beyond fp32,
            or no room for a router mask.
    """
    fields = _fields(write, site, context)
    flags = PRESERVE_NORM if write.preserve_norm else 0
    return Entry(stage=site.table[1], flags=flags, **fields, **gating)


def _fields(write: Write, site: Site, context: Context) -> dict[str, Any]:
    table = context.vectors
    match write.kernel:
        case "affine":
            return _affine(write, site.layer, context)
        case "router":
            assert write.activate is not None and write.deactivate is not None
            at = write.layers.index(site.layer)
            row = table.mask_row(write.activate[at], write.deactivate[at])
            return {"opcode": Opcode.ROUTER, "u": row, "gain": write.epsilon}
        case kernel if is_own_op(kernel):
            return {"opcode": Opcode.CUSTOM, "gain": write.scale}
    assert write.vector is not None
    row = table.row(write.vector, site.layer)
    if write.kernel in _ADDED:
        return {"opcode": _ADDED[write.kernel], "u": row, "gain": write.scale}
    if write.kernel == "feature_clamp":
        assert write.weight is not None
        return {
            "opcode": Opcode.RANK1,
            "function": Function.TOWARD_VALUE,
            "u": row,
            "v": table.row(write.weight, site.layer),
            "gain": write.scale,
            "bias": write.bias,
            "lo": write.value,
            "hi": write.threshold,
        }
    return {"opcode": Opcode.RANK1, "u": row, "v": row} | _along(write, site, context)


def _along(write: Write, site: Site, context: Context) -> dict[str, Any]:
    """What ablate, clamp and one_sided do along the direction of v."""
    norm = _norm(write, site.layer, context)
    found: dict[str, Any] = {"in_scale": 1 / norm, "gain": -write.scale / norm}
    match write.kernel:
        case "ablate":
            found = {"in_scale": 1.0, "gain": -write.scale / norm**2}
        case "one_sided":
            found |= {"function": Function.RELU, "bias": 0.0 - (write.offset or 0.0)}
        case "clamp":
            found |= {
                "function": Function.TOWARD_CLIP,
                "gain": write.scale / norm,
                "lo": -FLOAT32_LIMIT if write.lo is None else write.lo,
                "hi": FLOAT32_LIMIT if write.hi is None else write.hi,
            }
    if abs(found["gain"]) > FLOAT32_LIMIT:
        raise SpecError(
            "scale",
            write.scale,
            f"a scale small enough to be divided by |v| = {norm:g} in fp32",
            "use a smaller scale or a longer vector",
        )
    return found


def _norm(write: Write, layer: int, context: Context) -> float:
    """|v| at the layer, refused where a direction cannot be made of v."""
    assert write.vector is not None
    norm = math.sqrt(context.vectors.squared_norm(write.vector, layer))
    if not _MIN_NORM <= norm <= _MAX_NORM:
        raise SpecError(
            "vector",
            f"{write.vector} with norm {norm:g} at layer {layer}",
            f"for {write.kernel}, a norm within {_MIN_NORM:g}..{_MAX_NORM:g}",
            "leave this layer out, or register a vector that is not zero there",
        )
    return norm


def _affine(write: Write, layer: int, context: Context) -> dict[str, Any]:
    assert write.u is not None and write.v is not None and write.function is not None
    first_u, rank = context.vectors.rows(write.u, layer)
    first_v, _ = context.vectors.rows(write.v, layer)
    named = isinstance(write.bias, str)
    return {
        "opcode": Opcode.AFFINE,
        "function": Function[write.function.upper()],
        "u": first_u,
        "v": first_v,
        "rank": rank,
        "bias_row": context.vectors.row(str(write.bias), layer) if named else 0,
        "gain": write.scale,
    }
