"""Finds the boundaries of models whose residual add is fused with the next RMSNorm.

    embedding -> rms_norm                                 pre[0]
    layers.L.attention -> fused_add_rms_norm(x, h)        mid[L]
    layers.L.mlp       -> fused_add_rms_norm(x, h)        pre[L + 1]

Whether a norm of layer L stands before or after the layer's attention op decides between
pre[L] and mid[L]: dataflow, not module names, because `post_attention_layernorm` is the
boundary in Llama and a norm of the branch in Gemma.
"""

import itertools
import operator
from dataclasses import replace

import torch
from torch import fx

from eyesplice.fx_passes.graph_facts import (
    LayerMap,
    argument,
    op_name,
    value_of,
    writes_to,
)
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.records import Found, FusedBoundary
from eyesplice.fx_passes.sites import Table
from eyesplice.fx_passes.tokens import refuse_rows
from eyesplice.ops.layout import Stage


def find_fused_boundaries(
    layers: LayerMap,
    plan: SplicePlan,
    tokens: torch.SymInt | int | None,
    found: Found,
) -> None:
    """Append every fused boundary of the graph to `found`.

    Args:
        layers: the graph's nodes by decoder layer.
        plan: the names of the norm and attention ops.
        tokens: the batch's token dimension.
        found: receives the boundaries, and a reason for each that cannot be spliced.
    """
    after_attention: set[int] = set()
    tables: set[Table] = set()
    for node in layers.nodes:
        layer = layers.layer(node)
        if op_name(node) in plan.attention_ops and layer is not None:
            after_attention.add(layer)
        table = _table_of(node, layer, layer in after_attention, layers, plan)
        if table is None:
            continue
        if table in tables:
            found.refuse(
                table,
                f"the layer has more than one residual add here: {node.name} is another",
            )
            continue
        tables.add(table)
        boundary = _boundary(node, table, layers, plan)
        reason = boundary if isinstance(boundary, str) else _refuse(boundary, tokens)
        if reason is not None:
            found.refuse(table, reason)
        elif isinstance(boundary, FusedBoundary):
            found.fused.append(boundary)
    if any(boundary.branch for boundary in found.fused):
        _refuse_odd_layers(tables, after_attention, plan, found)
    # A table refused after it was found (a second add) must not be spliced either.
    found.fused = [
        b for b in found.fused if (b.table, Stage.STREAM) not in found.missing
    ]


def _refuse_odd_layers(
    tables: set[Table], with_attention: set[int], plan: SplicePlan, found: Found
) -> None:
    """Refuse the boundaries of layers that are not attention, then MLP.

    In a layer of one block, what follows from a boundary's place (whose input y is, whose
    output x is) does not hold.
    """
    for layer in range(plan.num_layers):
        around = (Table("pre", layer), Table("mid", layer), Table("pre", layer + 1))
        if layer in with_attention and all(table in tables for table in around):
            continue
        for table in around:
            found.refuse(
                table,
                f"layer {layer} is not an attention block followed by an MLP, each "
                "added to the residual stream",
            )


def defer_adds(
    boundaries: list[FusedBoundary], layers: LayerMap, plan: SplicePlan
) -> list[FusedBoundary]:
    """Let a boundary leave its add to the next one where Inductor does.

    Inductor computes the stream between attention and MLP again at the next norm, from
    the unrounded branches, rather than store and load it: as long as both norms are in
    one piece, which an attention op between them would split, and nobody else reads the
    stream. Without doing the same, an idle token would differ from vanilla by a rounding.
    A user's own op on h needs h, rounded and whole, so there nothing waits.

    Args:
        boundaries: the ones that will be spliced, in graph order.
        layers: the graph's nodes.
        plan: the names of the attention ops.
    """
    result = list(boundaries)
    splits = [layers.order(n) for n in layers.nodes if op_name(n) in plan.attention_ops]
    for place, (first, second) in enumerate(itertools.pairwise(boundaries)):
        start, stop = layers.order(first.norm), layers.order(second.norm)
        if (
            first.branch is not None
            and second.branch is not None
            and not any(
                Stage.STREAM in plan.custom.cut(b.table) for b in (first, second)
            )
            and result[place].pending is None
            and not (first.copy_stream or second.copy_stream)
            and second.stream in first.norm.users
            and set(second.stream.users) == {second.norm}
            and set(first.branch.users) == {first.norm} | _writers(first.branch)
            and not any(start < split < stop for split in splits)
        ):
            result[place] = replace(result[place], defer=True)
            result[place + 1] = replace(second, pending=first.branch)
    return result


def _writers(value: fx.Node) -> set[fx.Node]:
    """The ops that fill a value in place (a GEMM into an empty tensor)."""
    return {user for user in value.users if writes_to(user, value)}


def _table_of(
    node: fx.Node,
    layer: int | None,
    after_attention: bool,
    layers: LayerMap,
    plan: SplicePlan,
) -> Table | None:
    """The boundary that a node is the norm of, None for any other node."""
    name = op_name(node)
    if name == plan.fused_norm_op:
        if layer is None:
            return Table("pre", plan.num_layers)
        return Table("mid" if after_attention else "pre", layer)
    if name == plan.norm_op and layer == 0 and not after_attention:
        stream = argument(node, "x")
        enters = isinstance(stream, fx.Node) and layers.layer(stream) is None
        if enters:
            return Table("pre", 0)
    return None


def _boundary(
    node: fx.Node, table: Table, layers: LayerMap, plan: SplicePlan
) -> FusedBoundary | str:
    fused = op_name(node) == plan.fused_norm_op
    branch = argument(node, "x") if fused else None
    stream = argument(node, "x_residual" if fused else "x")
    scale = argument(node, "weight")
    if argument(node, "variance_size") is not None:
        return "the norm's variance is over a part of the row only"
    if not isinstance(scale, fx.Node):
        return "the norm has no weight"
    assert isinstance(stream, fx.Node)
    if fused and any(user.target is not operator.getitem for user in node.users):
        return "the norm's outputs are used as one tuple"
    weight, offset = _weight(scale)
    return FusedBoundary(
        table=table,
        norm=node,
        stream=stream,
        branch=branch if isinstance(branch, fx.Node) else None,
        weight=weight,
        weight_offset=offset,
        eps=float(argument(node, "epsilon")),
        copy_stream=_must_copy(stream, node, fused, layers),
    )


def _must_copy(stream: fx.Node, node: fx.Node, fused: bool, layers: LayerMap) -> bool:
    """Whether someone else owns or still reads the stream's buffer.

    After a fused add, the old stream is dead in every model seen; a later reader of it
    must not find the new one. After the first, add-less norm, later readers of the
    stream are its continuation and must see what was written.
    """
    if stream.op == "placeholder":
        return True
    return fused and any(True for _ in layers.users_after(stream, node))


def _weight(scale: fx.Node) -> tuple[fx.Node, float]:
    """Undo `weight.float() + 1` (Gemma), which would cost a kernel of its own."""
    if scale.target in (operator.add, torch.add) and len(scale.args) == 2:
        base, offset = scale.args
        if isinstance(base, fx.Node) and isinstance(offset, int | float):
            if base.op == "call_method" and base.target == "float":
                inner = base.args[0]
                assert isinstance(inner, fx.Node)
                base = inner
            return base, float(offset)
    return scale, 0.0


def _refuse(boundary: FusedBoundary, tokens: torch.SymInt | int | None) -> str | None:
    for node in (boundary.stream, boundary.branch):
        if node is not None and (reason := refuse_rows(node, tokens)):
            return reason
    stream, branch = value_of(boundary.stream), value_of(boundary.branch)
    assert stream is not None
    if branch is not None and branch.dtype != stream.dtype:
        return f"the stream is {stream.dtype} and the branch is {branch.dtype}"
    return None
