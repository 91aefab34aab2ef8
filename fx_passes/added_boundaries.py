"""Finds the boundaries of models that add to the residual stream in plain sight.

    h1 = attention(norm1(h0)) + h0      mid[L]: x = the attention's output, h = h1
    h2 = mlp(norm2(h1)) + h1            pre[L + 1]: x = the MLP's output, h = h2

The stream is followed from the value that enters layer 0, add by add. Parallel blocks
(`h + attention(n) + mlp(n)`, one norm, no stream between) lack `residual.mid` and
`mlp.pre`, and say so.
"""

import operator

import torch
from torch import fx

from eyesplice.fx_passes.graph_facts import LayerMap, op_name, value_of
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.records import Found, InlineValue
from eyesplice.fx_passes.sites import Table
from eyesplice.fx_passes.tokens import refuse_rows
from eyesplice.ops.layout import Stage

_ADDS = (operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor)
_MULTIPLICATIONS = (operator.mul, torch.mul)


def find_added_boundaries(
    layers: LayerMap,
    plan: SplicePlan,
    tokens: torch.SymInt | int | None,
    found: Found,
) -> None:
    """Append every boundary made of an explicit add to `found`, as inline values.

    Args:
        layers: the graph's nodes by decoder layer.
        plan: the names of the attention ops.
        tokens: the batch's token dimension.
        found: receives the values, and a reason for each that cannot be armed.
    """
    _Walk(layers, plan, tokens, found).run()


class _Walk:
    """One walk along the residual stream."""

    def __init__(
        self,
        layers: LayerMap,
        plan: SplicePlan,
        tokens: torch.SymInt | int | None,
        found: Found,
    ) -> None:
        self._layers = layers
        self._plan = plan
        self._tokens = tokens
        self._found = found
        self._stream: fx.Node | None = None
        self._attention: dict[int, fx.Node] = {}

    def run(self) -> None:
        adds: dict[int, list[fx.Node]] = {}
        for node in self._layers.nodes:
            layer = self._layers.layer(node)
            if layer is None:
                continue
            if op_name(node) in self._plan.attention_ops:
                self._attention.setdefault(layer, node)
            if self._stream is None:
                self._enter(node)
            elif self._is_stream_add(node):
                adds.setdefault(layer, []).append(node)
                self._stream = node
        for layer, nodes in adds.items():
            self._layer(layer, nodes)

    def _enter(self, node: fx.Node) -> None:
        """The first matrix from outside that a node of layer 0 reads is the stream."""
        for value in node.all_input_nodes:
            if refuse_rows(value, self._tokens) is None and self._is_float(value):
                self._stream = value
                self._add(Table("pre", 0), Stage.STREAM, value)
                self._normed(Table("pre", 0), value, 0)
                return

    def _is_float(self, node: fx.Node) -> bool:
        value = value_of(node)
        return value is not None and value.is_floating_point()

    def _is_stream_add(self, node: fx.Node) -> bool:
        if node.target not in _ADDS or self._stream not in node.args[:2]:
            return False
        other = self._branch(node, self._stream)
        old, new, added = (value_of(n) for n in (self._stream, node, other))
        return (
            old is not None
            and new is not None
            and added is not None
            and old.shape == new.shape == added.shape
        )

    @staticmethod
    def _branch(add: fx.Node, stream: fx.Node | None) -> fx.Node | None:
        """The other operand of an add to the stream."""
        others = [a for a in add.args[:2] if a is not stream and isinstance(a, fx.Node)]
        return others[0] if len(others) == 1 else None

    def _stream_of(self, add: fx.Node) -> fx.Node:
        """The operand of a stream add that is the stream: the one from further back."""
        first, second = (a for a in add.args[:2] if isinstance(a, fx.Node))
        order = self._layers.order
        return first if order(first) < order(second) else second

    def _layer(self, layer: int, adds: list[fx.Node]) -> None:
        mid, post = Table("mid", layer), Table("pre", layer + 1)
        streams = [self._stream_of(add) for add in adds]
        if len(adds) == 2 and layer in self._attention:
            first, second = adds
            self._branch_value(mid, first, streams[0])
            self._branch_value(post, second, streams[1])
            self._add(post, Stage.STREAM, second)
            self._normed(post, second, layer + 1)
            if set(first.users) == {second}:
                self._parallel(mid)
            else:
                self._add(mid, Stage.STREAM, first)
                self._normed(mid, first, layer)
        elif len(adds) == 1:
            self._add(post, Stage.STREAM, adds[0])
            self._normed(post, adds[0], layer + 1)
            self._joint_branch(layer, adds[0], streams[0])
        else:
            reason = f"layer {layer} adds to the stream {len(adds)} times, not twice"
            for stage in Stage:
                self._found.missing[mid, stage] = reason
                self._found.missing[post, stage] = reason

    def _joint_branch(self, layer: int, add: fx.Node, stream: fx.Node) -> None:
        """One add in the layer: `h + (attention + mlp)`, or a layer of one block."""
        mid, post = Table("mid", layer), Table("pre", layer + 1)
        branch = self._branch(add, stream)
        self._parallel(mid)
        attention = self._attention.get(layer)
        parts = [a for a in branch.args[:2] if isinstance(a, fx.Node)] if branch else []
        if (
            branch is None
            or branch.target not in _ADDS
            or len(parts) != 2
            or not attention
        ):
            reason = "the layer adds one block to the stream, not attention and MLP"
            self._found.missing[mid, Stage.BRANCH] = reason
            self._found.missing[post, Stage.BRANCH] = reason
            return
        block = self._layers.child(attention).split(".")[0]
        if self._layers.child(parts[0]).split(".")[0] != block:
            parts.reverse()
        for table, part in zip((mid, post), parts, strict=True):
            if self._plan.tensor_parallel_size > 1:
                self._found.missing[table, Stage.BRANCH] = (
                    "under tensor parallelism the parallel branches are partial sums "
                    "until after they are added to one another"
                )
            else:
                self._add(table, Stage.BRANCH, part, before=branch)

    def _parallel(self, mid: Table) -> None:
        reason = (
            "attention and MLP run in parallel on one normed value: there is no stream "
            "between them (use residual.pre, residual.post or attention.pre)"
        )
        self._found.missing[mid, Stage.STREAM] = reason
        self._found.missing[mid, Stage.NORMED] = reason

    def _branch_value(self, table: Table, add: fx.Node, stream: fx.Node) -> None:
        branch = self._branch(add, stream)
        if branch is None:
            self._found.missing[table, Stage.BRANCH] = "the add has no tensor branch"
            return
        before = add
        # `h + multiplier * branch` (Granite): the component's output is the branch.
        while branch.target in _MULTIPLICATIONS:
            tensors = [a for a in branch.args if isinstance(a, fx.Node)]
            if len(tensors) != 1 or len(branch.users) != 1:
                break
            before, branch = branch, tensors[0]
        self._add(table, Stage.BRANCH, branch, before=before)

    def _normed(self, table: Table, stream: fx.Node, layer: int) -> None:
        """The output of the norm that reads the stream at the start of a block."""
        if layer == self._plan.num_layers:
            return
        readers = [
            user
            for user in stream.users
            if self._layers.layer(user) == layer and self._layers.child(user)
        ]
        reader = self._layers.earliest(readers)
        if reader is None or not _is_norm(reader):
            self._found.missing[table, Stage.NORMED] = (
                "no norm reads the stream here: the block takes it as it is"
            )
            return
        child = self._layers.child(reader)
        inside = [
            node
            for node in self._layers.nodes
            if self._layers.layer(node) == layer and self._layers.child(node) == child
        ]
        leaving = [
            node
            for node in inside
            if any(user not in inside for user in node.users) and self._is_float(node)
        ]
        if len(leaving) != 1:
            self._found.missing[table, Stage.NORMED] = (
                f"the norm {child} has {len(leaving)} results"
            )
            return
        outside = [user for user in leaving[0].users if user not in inside]
        before = self._layers.earliest(outside)
        self._add(table, Stage.NORMED, leaving[0], before=before)

    def _add(
        self,
        table: Table,
        stage: Stage,
        value: fx.Node,
        before: fx.Node | None = None,
    ) -> None:
        before = before or self._layers.earliest(value.users)
        reason = refuse_rows(value, self._tokens)
        if before is None:
            reason = "nothing in the graph reads the value"
        if reason is not None:
            self._found.missing[table, stage] = reason
        else:
            assert before is not None
            self._found.inline.append(InlineValue(table, stage, value, before))


def _is_norm(node: fx.Node) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    cls = next(reversed(stack.values()))[1] if stack else ""
    name = cls if isinstance(cls, str) else getattr(cls, "__name__", "")
    return "norm" in name.lower() or "norm" in str(node.target).lower()
