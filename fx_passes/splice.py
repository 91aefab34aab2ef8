"""Edits the graph: consumes the finders' records, inserts the ops, drops the anchors.

Before, one boundary of a Llama layer in the Dynamo graph of vLLM (T tokens, H hidden):

    anchor = eyesplice.anchor([mid_1, pre_1], 1)
    branch: bf16[T, H] = ...  # output of o_proj
    fused = vllm_ir.fused_add_rms_norm.maybe_inplace(branch, stream, weight, 1e-5, None)
    normed: bf16[T, H] = fused[0]
    stream_1: bf16[T, H] = fused[1]

After (`stream` is written in place and stands for `stream_1` from here on):

    branch: bf16[T, H] = ...
    normed: bf16[T, H] = eyesplice.boundary_(
        stream, branch, weight, 0.0, 1e-5, mid_1, 1023, None, True)
    ...
    normed_1: bf16[T, H] = eyesplice.boundary_(  # the add of `branch` was left to it
        stream, mlp, weight_1, 0.0, 1e-5, pre_2, 1023, branch, False)

Any other value, before and after (1023 are the op families that are compiled in; the
tables beside the program `pre_2` are found by it, see `ops.site_tables`):

    h: bf16[T, H] = branch + stream
    ----
    h: bf16[T, H] = branch + stream
    eyesplice.inline_(h, 1, pre_2, 1023)

A user's own op runs behind the programs' entries at its value. At h of a boundary
(`custom_sites` says which tables the boundary is cut into):

    eyesplice.inline_(branch, 0, mid_1_x, 1023)
    stream_1: bf16[T, H] = branch + stream
    eyesplice.inline_(stream_1, 1, mid_1_h, 1023)
    gain: f32[T] = eyesplice.custom_gain(stream_1, custom_1)
    lib.op(stream_1, gain, weight_1)
    normed: bf16[T, H] = eyesplice.boundary_(
        stream_1, None, weight, 0.0, 1e-5, mid_1, 1023, None, False)
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from eyesplice.fx_passes.custom_ops import find_op
from eyesplice.fx_passes.custom_sites import NO_CUSTOM_SITES, CustomSites
from eyesplice.fx_passes.graph_facts import value_of, writes_to
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.records import Found, FusedBoundary, InlineValue
from eyesplice.fx_passes.sites import Table
from eyesplice.ops import contracts
from eyesplice.ops.layout import Stage


@dataclass(slots=True)
class Anchored:
    """The graph inputs that the anchors brought in.

    Attributes:
        nodes: the anchor nodes, to be erased.
        programs: the placeholder of each program table.
        families: the op families that every op compiles in.
        custom: the users' own ops.
        weights: the placeholder of each one's weight, by its number.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    programs: dict[Table, fx.Node] = field(default_factory=dict)
    families: int = 0
    custom: CustomSites = NO_CUSTOM_SITES
    weights: dict[int, fx.Node] = field(default_factory=dict)


def read_anchors(graph: fx.Graph, plan: SplicePlan) -> Anchored:
    """The tensors behind the graph's anchors, each as the placeholder it came in by."""
    anchored = Anchored(families=plan.families, custom=plan.custom)
    for node in graph.nodes:
        if node.target is not contracts.anchor:
            continue
        anchored.nodes.append(node)
        tensors, layer = node.args
        assert isinstance(layer, int)
        tables, custom = plan.tables_of_layer(layer), plan.custom_of_layer(layer)
        programs, weights = tensors[: len(tables)], tensors[len(tables) :]
        anchored.programs.update(zip(tables, programs, strict=True))
        numbers = (one.number for one in custom)
        anchored.weights.update(zip(numbers, weights, strict=True))
    return anchored


def splice(graph: fx.Graph, found: Found, anchored: Anchored) -> None:
    """Insert every found op and erase the anchors.

    Args:
        graph: edited in place.
        found: what to splice; all of it is.
        anchored: where the tables come from.
    """
    for value in found.inline:
        _splice_inline(graph, value, anchored)
    # A boundary's stream is a result of the boundary before, which is gone by then.
    replaced: dict[fx.Node, fx.Node] = {}
    for boundary in found.fused:
        _splice_fused(graph, boundary, anchored, replaced)
    for node in anchored.nodes:
        graph.erase_node(node)


def _tables(anchored: Anchored, table: Table) -> tuple[Any, ...]:
    """The arguments that every op takes for its program."""
    return anchored.programs[table], anchored.families


def _splice_fused(
    graph: fx.Graph,
    boundary: FusedBoundary,
    anchored: Anchored,
    replaced: dict[fx.Node, fx.Node],
) -> None:
    norm = boundary.norm
    stream = replaced.get(boundary.stream, boundary.stream)
    with graph.inserting_before(norm):
        branch, cut = boundary.branch, anchored.custom.cut(boundary.table)
        if branch is not None and Stage.BRANCH in cut:
            branch = _own(graph, branch, norm)
            _run(graph, branch, boundary.table, Stage.BRANCH, anchored, norm)
        if Stage.STREAM in cut and branch is not None:
            stream, branch = _add(graph, branch, stream, norm), None
        elif boundary.copy_stream:
            stream = _copy(graph, stream, norm)
        if Stage.STREAM in cut:
            _run(graph, stream, boundary.table, Stage.STREAM, anchored, norm)
        normed = graph.call_function(
            contracts.boundary_,
            (
                stream,
                branch,
                boundary.weight,
                boundary.weight_offset,
                boundary.eps,
                *_tables(anchored, boundary.table),
                boundary.pending,
                boundary.defer,
            ),
        )
        _describe(normed, norm, _like(value_of(stream)))
        _run_custom(graph, normed, boundary.table, Stage.NORMED, anchored, norm)
    if boundary.branch is None:
        _replace_later_uses(boundary.stream, stream, normed)
        replaced[boundary.stream] = stream
        norm.replace_all_uses_with(normed)
    else:
        for user in list(norm.users):
            assert user.target is operator.getitem
            replaced[user] = normed if user.args[1] == 0 else stream
            user.replace_all_uses_with(replaced[user])
            graph.erase_node(user)
    scale = norm.args[2] if boundary.branch is not None else norm.args[1]
    graph.erase_node(norm)
    _erase_if_unused(graph, scale)


def _splice_inline(graph: fx.Graph, found: InlineValue, anchored: Anchored) -> None:
    value = found.value
    with graph.inserting_before(found.before):
        if value.op == "placeholder":
            value = _copy(graph, value, found.before)
        node = _run(graph, value, found.table, found.stage, anchored, found.before)
    if value is not found.value:
        _replace_later_uses(found.value, value, node)


def _run(
    graph: fx.Graph,
    value: fx.Node,
    table: Table,
    stage: Stage,
    anchored: Anchored,
    like: fx.Node,
) -> fx.Node:
    """Run one stage on a value in place: its entries, then the users' own ops."""
    own_table = anchored.custom.table_of(table, stage)
    node = graph.call_function(
        contracts.inline_, (value, int(stage), *_tables(anchored, own_table))
    )
    _describe(node, like, None)
    _run_custom(graph, value, table, stage, anchored, like)
    return node


def _run_custom(
    graph: fx.Graph,
    value: fx.Node,
    table: Table,
    stage: Stage,
    anchored: Anchored,
    like: fx.Node,
) -> None:
    """Run the users' own ops of one stage on a value in place."""
    rows = value_of(value)
    assert rows is not None
    for custom in anchored.custom.at(table, stage):
        program = anchored.programs[custom.table]
        gain = graph.call_function(contracts.custom_gain, (value, program))
        _describe(gain, like, rows.new_empty((rows.shape[0],), dtype=torch.float32))
        weight = anchored.weights[custom.number]
        node = graph.call_function(find_op(custom.op), (value, gain, weight))
        _describe(node, like, None)


def _own(graph: fx.Graph, branch: fx.Node, norm: fx.Node) -> fx.Node:
    """The branch, or a copy if its buffer is not this boundary's to write to."""
    writers = {user for user in branch.users if writes_to(user, branch)}
    if branch.op != "placeholder" and set(branch.users) <= {norm} | writers:
        return branch
    return _copy(graph, branch, norm)


def _add(graph: fx.Graph, x: fx.Node, stream: fx.Node, like: fx.Node) -> fx.Node:
    total = graph.call_function(torch.add, (x, stream))
    _describe(total, like, _like(value_of(stream)))
    return total


def _copy(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    copy = graph.call_function(torch.clone, (value,))
    _describe(copy, like, _like(value_of(value)))
    return copy


def _replace_later_uses(old: fx.Node, new: fx.Node, after: fx.Node) -> None:
    """Let every reader of `old` that follows `after` read `new`."""
    if old is new:
        return
    later = set()
    node = after.next
    while node.op != "root":
        later.add(node)
        node = node.next
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)


def _erase_if_unused(graph: fx.Graph, node: Any) -> None:
    """Erase the `weight + 1` that the op took over, and what only it needed."""
    while isinstance(node, fx.Node) and node.op != "placeholder" and not node.users:
        inputs = node.all_input_nodes
        graph.erase_node(node)
        node = inputs[0] if inputs else None


def _like(value: torch.Tensor | None) -> torch.Tensor:
    """A fake tensor as the op returns it, in the value's own fake mode."""
    assert value is not None
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _describe(node: fx.Node, origin: fx.Node, value: torch.Tensor | None) -> None:
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    node.meta["example_value"] = value
