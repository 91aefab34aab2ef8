"""From a request to table rows.

With v the vector as the bank stores it, each write is one entry per layer, of the form
h += gain * f(in_scale * (v.h) + bias) * v:

    kernel           f            in_scale  bias     gain
    steering_vector  1 (ADD)                         scale
    ablate           identity     1         0        -scale / |v|^2
    clamp            toward clip  1 / |v|   0        scale / |v|
    one_sided        relu         1 / |v|   -offset  -scale / |v|
"""

import math
from collections.abc import Iterable
from typing import Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import ClauseBuilder
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.plain import within
from eyesplice.fx_passes.program import FLOAT32_LIMIT, Entry, Program
from eyesplice.fx_passes.request import Request
from eyesplice.fx_passes.sites import SUBMODULES, Site, Table
from eyesplice.fx_passes.writes import Write
from eyesplice.ops.layout import Function, Opcode

_MIN_NORM: Final = 1e-18
_MAX_ADDED: Final = 1e8
_MAX_GROWTH: Final = 1e6
_MAX_NORM: Final = 1e18
"""Between these, 1 / |v|^2 is a normal fp32 number."""


def lower(request: Request, context: Context) -> Program:
    """The program that does what the request says.

    Entries of one value keep the order of the writes. `residual.post` of a layer and
    `residual.pre` of the next are one value: the writes to the former come first.

    Args:
        request: parsed with the same context.
        context: what the model offers.

    Raises:
        SpecError: a vector that a kernel cannot divide by the norm of, too many
            conditions, too many entries in one table, or writes so large that values
            could overflow.
    """
    _refuse_overflow(request, context)
    builder = ClauseBuilder()
    placed: dict[Table, list[tuple[Site, Entry]]] = {}
    for i, write in enumerate(request.writes):
        with within(f"writes[{i}]"):
            clause_mask = 1 << builder.add(write.when)
            for layer in write.layers:
                site = Site(layer, write.submodule)
                entry = _entry(write, site, clause_mask, context)
                placed.setdefault(site.table[0], []).append((site, entry))
    return Program(
        digest=request.digest(context.vectors),
        clauses=tuple(builder.clauses),
        tables={
            table: _ordered(table, items, context) for table, items in placed.items()
        },
    )


def _refuse_overflow(request: Request, context: Context) -> None:
    """Keep activations finite: a NaN in the KV cache outlives its request.

    Attention multiplies stale rows of a partly filled block by a weight of 0, and 0
    times NaN is NaN, in whatever request has the block next. Writes add at most the sum
    of their lengths, and a projection of scale s multiplies by at most |1 - s|; within
    the limits the squares and products that a layer forms stay far inside fp32.
    """
    added, growth = 0.0, 1.0
    for i, write in enumerate(request.writes):
        bounds = [abs(b) for b in (write.lo, write.hi, write.offset) if b is not None]
        for layer in write.layers:
            if write.kernel == "steering_vector":
                squared = context.vectors.squared_norm(write.vector, layer)
                added += abs(write.scale) * math.sqrt(squared)
            else:
                added += abs(write.scale) * max(bounds, default=0.0)
                growth *= max(1.0, abs(1.0 - write.scale))
            if added > _MAX_ADDED or growth > _MAX_GROWTH:
                raise SpecError(
                    f"writes[{i}].scale",
                    write.scale,
                    f"writes that add at most {_MAX_ADDED:g} in all (lengths of the "
                    f"scaled vectors) and multiply by at most {_MAX_GROWTH:g}",
                    "use a smaller scale or fewer layers",
                )


def _entry(write: Write, site: Site, clause_mask: int, context: Context) -> Entry:
    row = context.vectors.row(write.vector, site.layer)
    _, stage = site.table
    if write.kernel == "steering_vector":
        return Entry(
            stage=stage,
            opcode=Opcode.ADD,
            u=row,
            clause_mask=clause_mask,
            gain=write.scale,
        )
    norm = _norm(write, site.layer, context)
    function, in_scale, bias, gain = Function.IDENTITY, 1.0, 0.0, -write.scale / norm**2
    lo = hi = 0.0
    if write.kernel == "clamp":
        function, in_scale, gain = Function.TOWARD_CLIP, 1 / norm, write.scale / norm
        lo = -FLOAT32_LIMIT if write.lo is None else write.lo
        hi = FLOAT32_LIMIT if write.hi is None else write.hi
    if write.kernel == "one_sided":
        function, in_scale, gain = Function.RELU, 1 / norm, -write.scale / norm
        bias = 0.0 - (write.offset or 0.0)
    if abs(gain) > FLOAT32_LIMIT:
        raise SpecError(
            "scale",
            write.scale,
            f"a scale small enough to be divided by |v| = {norm:g} in fp32",
            "use a smaller scale or a longer vector",
        )
    return Entry(
        stage=stage,
        opcode=Opcode.RANK1,
        function=function,
        u=row,
        v=row,
        clause_mask=clause_mask,
        gain=gain,
        in_scale=in_scale,
        bias=bias,
        lo=lo,
        hi=hi,
    )


def _norm(write: Write, layer: int, context: Context) -> float:
    """|v| at the layer, refused where a direction cannot be made of v."""
    norm = math.sqrt(context.vectors.squared_norm(write.vector, layer))
    if not _MIN_NORM <= norm <= _MAX_NORM:
        raise SpecError(
            "vector",
            f"{write.vector} with norm {norm:g} at layer {layer}",
            f"for {write.kernel}, a norm within {_MIN_NORM:g}..{_MAX_NORM:g}",
            "leave this layer out, or register a vector that is not zero there",
        )
    return norm


def _ordered(
    table: Table, items: list[tuple[Site, Entry]], context: Context
) -> tuple[Entry, ...]:
    if len(items) > context.max_entries:
        raise SpecError(
            f"writes at {_sites(table, context.num_layers)}, which share one table:",
            f"{len(items)} entries",
            f"at most {context.max_entries} per request (max_entries)",
            "send fewer writes there, or raise `max_entries` in the configuration",
        )
    items = sorted(
        items, key=lambda item: (item[1].stage, item[0].submodule == "residual.pre")
    )
    return tuple(entry for _, entry in items)


def _sites(table: Table, num_layers: int) -> str:
    """The sites whose entries the table holds."""
    layers: Iterable[int] = range(max(0, table.layer - 1), table.layer + 1)
    sites = [Site(layer, name) for layer in layers for name in SUBMODULES]
    found = [s for s in sites if s.layer < num_layers and s.table[0] == table]
    return ", ".join(map(str, found))
