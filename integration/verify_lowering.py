"""Checks a piece after Inductor's passes: every spliced op is there, none gains a copy.

At this point Inductor holds a mutating op as

    out = auto_functionalized(eyesplice.boundary_.default, stream=s, ...)
    normed = out[0]; s_1 = out[1]

and turns it back into an in-place call, without a copy of `s`, unless somebody reads the
old `s` afterwards.
"""

import logging

import torch
from torch import fx

from eyesplice.fx_passes.splice_pass import SPLICED

logger = logging.getLogger("vllm.eyesplice")


def verify_lowering(graph: fx.Graph) -> int:
    """Check every spliced op of one piece.

    Args:
        graph: after Inductor's passes, functional.

    Returns:
        How many spliced ops the piece holds.

    Raises:
        RuntimeError: an op's stream is read again after it, so it would be copied.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    count = 0
    for node in graph.nodes:
        if node.target in SPLICED:
            count += 1
        elif node.args and node.args[0] in SPLICED:
            count += 1
            for name in ("stream", "branch", "value"):
                _refuse_copy(node, node.kwargs.get(name), order)
    logger.debug("%d spliced ops survived in this piece", count)
    return count


def _refuse_copy(node: fx.Node, written: object, order: dict[fx.Node, int]) -> None:
    if not isinstance(written, fx.Node):
        return
    later = [
        user
        for user in written.users
        if order[user] > order[node] and not _stores_back(user, written)
    ]
    if later:
        raise RuntimeError(
            f"{node.name} would copy {written.name}: {later[0].name} reads it "
            "again; report this model as an eyesplice issue"
        )


def _stores_back(user: fx.Node, written: fx.Node) -> bool:
    """Whether this is the `copy_` that gives a graph input its new value.

    Inductor drops it together with the copy when it runs the op in place.
    """
    return user.target is torch.ops.aten.copy_.default and user.args[0] is written
