"""Proof that a value's rows are the batch's tokens, all of them, in order of the batch.

The per-token tables are indexed by position in the batch. A value whose token dimension
is only a part of it (a rank's chunk under sequence parallelism) would read another
token's program, so its first dimension must be the very symbol of the batch.
"""

import sympy
import torch
from torch import fx

from eyesplice.fx_passes.graph_facts import value_of

_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "positions")


def token_dimension(graph: fx.Graph) -> torch.SymInt | int | None:
    """The batch's number of tokens: the first dimension of the model's input.

    Returns:
        A symbol, an int in a graph of static shape, None when no input is recognised.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for name in _INPUTS:
        for node in placeholders:
            value = value_of(node)
            if name in str(node.target).lower() and value is not None and value.dim():
                return value.shape[0]
    return None


def same_dimension(a: torch.SymInt | int, b: torch.SymInt | int) -> bool:
    """Whether two sizes are equal for every batch, by sympy."""
    return bool(sympy.simplify(_expression(a) - _expression(b)) == 0)


def _expression(size: torch.SymInt | int) -> sympy.Expr:
    # sympify would parse text; a SymInt hands over its expression as it is.
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def refuse_rows(node: fx.Node, tokens: torch.SymInt | int | None) -> str | None:
    """Why the rows of a value cannot be taken for the batch's tokens, None if they can."""
    value = value_of(node)
    if value is None:
        return "the value is not one tensor in the graph"
    if tokens is None:
        return "the graph has no input whose first dimension is the batch's tokens"
    if value.dim() != 2:
        return f"the value has shape {list(value.shape)}, not [tokens, width]"
    if not same_dimension(value.shape[0], tokens):
        return (
            f"its rows ({value.shape[0]}) are not the batch's tokens ({tokens}): "
            "a part of the batch, as under sequence parallelism"
        )
    if value.stride(-1) != 1 or not same_dimension(value.stride(0), value.shape[1]):
        return f"its rows are not contiguous (strides {list(value.stride())})"
    return None
