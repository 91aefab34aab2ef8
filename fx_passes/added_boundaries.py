"""Finds the boundaries of models that add to the residual stream in plain sight.

    h1 = attention(norm1(h0)) + h0      mid[L]: x = the attention's output, h = h1
    h2 = mlp(norm2(h1)) + h1            pre[L + 1]: x = the MLP's output, h = h2

The stream is followed from the value that enters layer 0, add by add. Parallel blocks
(`h + attention(n) + mlp(n)`, one norm, no stream between) lack `residual.mid` and
`mlp.pre`, and say so.
"""

import operator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Add:
    """One add to the stream: the node, the stream it adds to, and where it stands."""

    node: fx.Node
    stream: fx.Node
    layer: int | None


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
        adds: list[_Add] = []
        for node in self._layers.nodes:
            layer = self._layers.layer(node)
            if op_name(node) in self._plan.attention_ops and layer is not None:
                self._attention.setdefault(layer, node)
            if self._stream is None:
                if layer == 0:
                    self._enter(node)
            elif self._is_stream_add(node):
                adds.append(_Add(node, self._stream, layer))
                self._stream = node
        placed = self._place(adds)
        reason = self._refuse(placed, len(adds))
        if reason is not None:
            self._found.inline.clear()
            for table in self._boundaries():
                self._found.refuse(table, reason)
            return
        for layer in range(self._plan.num_layers):
            self._layer(layer, placed)

    def _boundaries(self) -> list[Table]:
        numbers = range(self._plan.num_layers + 1)
        return [Table(kind, n) for kind in ("pre", "mid") for n in numbers]

    def _place(self, adds: list["_Add"]) -> dict[Table, "_Add"]:
        """The boundary of each add, by where it stands to its layer's attention.

        Before it, the add is the one of the MLP of the layer before, done late (as in
        Nemotron's norms); after it, the first is attention's and the second the MLP's.
        """
        placed: dict[Table, _Add] = {}
        for add in adds:
            if add.layer is None:
                table = Table("pre", self._plan.num_layers)
            elif not self._after_attention(add):
                table = Table("pre", add.layer)
            elif Table("mid", add.layer) not in placed:
                table = Table("mid", add.layer)
            else:
                table = Table("pre", add.layer + 1)
            placed.setdefault(table, add)
        # A layer's only add ends it: attention and MLP were added to one another.
        for layer in range(self._plan.num_layers):
            mid, post = Table("mid", layer), Table("pre", layer + 1)
            if mid in placed and post not in placed:
                placed[post] = placed.pop(mid)
        return placed

    def _after_attention(self, add: "_Add") -> bool:
        attention = self._attention.get(-1 if add.layer is None else add.layer)
        order = self._layers.order
        return attention is None or order(add.node) > order(attention)

    def _refuse(self, placed: dict[Table, "_Add"], num_adds: int) -> str | None:
        """Why the adds are not those of one residual stream through every layer."""
        if self._stream is None:
            return (
                "no [tokens, hidden] value enters the first layer (models that run "
                "through vLLM's Transformers backend hold [1, tokens, hidden])"
            )
        form = "the layers are not of the form h + block(norm(h)), twice each"
        for layer in range(self._plan.num_layers):
            if Table("pre", layer + 1) not in placed:
                return f"no add to the residual stream ends layer {layer}: {form}"
        if num_adds != len(placed):
            return f"{num_adds} adds to the residual stream were found: {form}"
        return None

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

    def _layer(self, layer: int, placed: dict[Table, "_Add"]) -> None:
        mid, post = Table("mid", layer), Table("pre", layer + 1)
        first, second = placed.get(mid), placed[post]
        self._add(post, Stage.STREAM, second.node)
        self._normed(post, second.node, layer + 1)
        if first is None:
            self._joint_branch(layer, second)
            return
        self._branch_value(mid, first)
        self._branch_value(post, second)
        if set(first.node.users) == {second.node}:
            self._parallel(mid)
        else:
            self._add(mid, Stage.STREAM, first.node)
            self._normed(mid, first.node, layer)

    def _joint_branch(self, layer: int, add: "_Add") -> None:
        """One add in the layer: `h + (attention + mlp)`, or a layer of one block."""
        mid, post = Table("mid", layer), Table("pre", layer + 1)
        branch = self._branch(add.node, add.stream)
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
            for table in (mid, post):
                self._found.refuse(table, reason, [Stage.BRANCH])
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
        self._found.refuse(mid, reason, [Stage.STREAM, Stage.NORMED])

    def _branch_value(self, table: Table, add: "_Add") -> None:
        branch = self._branch(add.node, add.stream)
        if branch is None:
            self._found.missing[table, Stage.BRANCH] = "the add has no tensor branch"
            return
        before = add.node
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
            if node is not stream
            and any(user not in inside for user in node.users)
            and self._is_float(node)
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
