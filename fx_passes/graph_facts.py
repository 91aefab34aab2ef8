"""Questions about a Dynamo graph: what a node calls, where it stands, what it writes."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})


def op_name(node: fx.Node) -> str:
    """The qualified name ("vllm_ir::rms_norm") of a called torch op, or "" for others."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""


def module_path(node: fx.Node) -> str:
    """The dotted path of the module that the node was traced in, below the root.

    For `L['self'].layers.3.mlp.down_proj` it is "layers.3.mlp.down_proj".
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return re.sub(r"^L\['self'\]\.?", "", path)


def value_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for, None when it is no tensor."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def is_view(node: fx.Node) -> bool:
    """Whether the node is a reshaping of its first argument's storage."""
    return node.op == "call_method" and node.target in _VIEWS


def _declared(node: fx.Node) -> list[Any]:
    """The arguments that the schema of a called torch op declares, none for others."""
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        return []
    return list(target._schema.arguments)


def writes_to(node: fx.Node, value: fx.Node) -> bool:
    """Whether the op's schema says that it writes to its argument `value`."""
    for index, declared in enumerate(_declared(node)):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        given = node.args[index] if index < len(node.args) else None
        if given is value or node.kwargs.get(declared.name) is value:
            return True
    return False


def argument(node: fx.Node, name: str) -> Any:
    """The argument that an op's schema calls `name`, None when it was not given."""
    if name in node.kwargs:
        return node.kwargs[name]
    for index, declared in enumerate(_declared(node)):
        if declared.name == name and index < len(node.args):
            return node.args[index]
    return None


class LayerMap:
    """The decoder layer of every node, and the graph order of the nodes."""

    def __init__(self, graph: fx.Graph, layers_path: str) -> None:
        pattern = re.compile(rf"{re.escape(layers_path)}\.(\d+)(?:\.(.+))?")
        self.nodes: tuple[fx.Node, ...] = tuple(graph.nodes)
        self._order = {node: index for index, node in enumerate(self.nodes)}
        # The finders ask for every node's place many times over.
        self._place: dict[fx.Node, tuple[int, str]] = {}
        for node in self.nodes:
            if found := pattern.fullmatch(module_path(node)):
                self._place[node] = int(found[1]), found[2] or ""

    def layer(self, node: fx.Node) -> int | None:
        """The decoder layer the node was traced in, None outside of the layers."""
        place = self._place.get(node)
        return place[0] if place and node.op != "placeholder" else None

    def child(self, node: fx.Node) -> str:
        """The path of the node's module below its decoder layer ("mlp.down_proj")."""
        place = self._place.get(node)
        return place[1] if place else ""

    def order(self, node: fx.Node) -> int:
        """The node's place in the graph."""
        return self._order[node]

    def earliest(self, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """The first of the nodes in graph order, None of none."""
        return min(nodes, key=self.order, default=None)

    def users_after(self, value: fx.Node, node: fx.Node) -> Iterator[fx.Node]:
        """Users of a value, or of a view of it, that come after `node`."""
        for user in value.users:
            if user is not node and self.order(user) > self.order(node):
                yield user
            if is_view(user) and user is not node:
                yield from self.users_after(user, node)
