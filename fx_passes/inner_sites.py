"""Finds the values inside a block: per-head outputs and router logits.

z = attention_op(q, k, v, out=z)   ->  attention.heads[L] = z, before o_proj
moe_op(h, router_logits, ...)      ->  router.logits[L] = the op's argument
moe_op(h, h, ...)                  ->  the router runs inside: its module is hooked
"""

import torch
from torch import fx

from eyesplice.fx_passes.graph_facts import (
    LayerMap,
    argument,
    is_view,
    op_name,
    value_of,
    writes_to,
)
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.records import Found, InlineValue
from eyesplice.fx_passes.sites import Table
from eyesplice.fx_passes.tokens import refuse_rows
from eyesplice.ops.layout import Stage


def find_heads(
    layers: LayerMap,
    plan: SplicePlan,
    tokens: torch.SymInt | int | None,
    found: Found,
) -> None:
    """Append each layer's per-head attention output, or the reason why it is missing."""
    done: set[int] = set()
    for node in layers.nodes:
        layer = layers.layer(node)
        if layer is None or layer in done or op_name(node) not in plan.attention_ops:
            continue
        table = Table("heads", layer)
        if plan.tensor_parallel_size > 1:
            found.missing[table, Stage.BRANCH] = (
                "under tensor parallelism a rank holds only its own heads"
            )
            continue
        value = _head_output(node, layers, tokens)
        if isinstance(value, str):
            # Some models call a helper op first: only the last word counts.
            found.missing[table, Stage.BRANCH] = value
            continue
        before = layers.earliest(
            u for u in value.users if layers.order(u) > layers.order(node)
        )
        if before is None:
            found.missing[table, Stage.BRANCH] = "nothing reads the attention's output"
            continue
        done.add(layer)
        found.missing.pop((table, Stage.BRANCH), None)
        found.inline.append(InlineValue(table, Stage.BRANCH, value, before))


def _head_output(
    node: fx.Node, layers: LayerMap, tokens: torch.SymInt | int | None
) -> fx.Node | str:
    """The op's output as a `[tokens, heads * head_dim]` value, after the op."""
    written = [a for a in node.all_input_nodes if writes_to(node, a)]
    candidates = [argument(node, "output"), *written, node]
    for value in candidates:
        if not isinstance(value, fx.Node) or value_of(value) is None:
            continue
        for view in _views_after(value, node, layers):
            if refuse_rows(view, tokens) is None:
                return view
    return "the attention op's output is not a [tokens, heads * head_dim] value"


def _views_after(value: fx.Node, node: fx.Node, layers: LayerMap) -> list[fx.Node]:
    """The views of the value that are made once `node` has run, then the value."""
    chain: list[fx.Node] = []
    for user in sorted(value.users, key=layers.order):
        if is_view(user) and layers.order(user) > layers.order(node):
            chain.extend(_views_after(user, node, layers))
    return [*chain[::-1], value] if chain else [value]


def find_router_logits(
    layers: LayerMap,
    plan: SplicePlan,
    tokens: torch.SymInt | int | None,
    found: Found,
) -> None:
    """Append each mixture layer's router logits, or the reason why they are missing."""
    hidden = {router.layer: router for router in plan.hidden_routers}
    for layer in range(plan.num_layers):
        table = Table("router", layer)
        value = _logits(layer, layers, plan)
        if isinstance(value, str):
            router = hidden.get(layer)
            if router is not None and router.reason is None:
                found.hooked[table, Stage.BRANCH] = router.module
            else:
                reason = router.reason if router else None
                found.missing[table, Stage.BRANCH] = reason or value
            continue
        logits, before = value
        if reason := refuse_rows(logits, tokens):
            found.missing[table, Stage.BRANCH] = reason
        else:
            found.inline.append(InlineValue(table, Stage.BRANCH, logits, before))


def _logits(
    layer: int, layers: LayerMap, plan: SplicePlan
) -> tuple[fx.Node, fx.Node] | str:
    """The logits' node and their first reader, or the reason why there is none."""
    if not plan.num_experts:
        return "the model has no experts"
    for node in layers.nodes:
        if layers.layer(node) != layer:
            continue
        # The op's argument on CUDA; on CPU the experts' code is traced into the graph.
        inside = op_name(node) in plan.moe_ops or layers.child(node).endswith("experts")
        if not inside:
            continue
        for value in node.all_input_nodes:
            tensor = value_of(value)
            if (
                tensor is not None
                and tensor.dim() == 2
                and tensor.shape[-1] == plan.num_experts
                and value.op != "placeholder"
                and not layers.child(value).endswith("experts")
            ):
                return value, node
    return "the router runs inside the experts' op: its logits are not in the graph"
