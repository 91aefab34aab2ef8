import pytest
import torch
from torch import fx

from eyesplice.integration.verify_lowering import verify_lowering
from eyesplice.ops import contracts

AUTO = torch.ops.higher_order.auto_functionalized


def piece(reads_old: bool, stores_back: bool) -> fx.Graph:
    """A piece as Inductor holds it: one boundary, functional, its stream an input."""
    graph = fx.Graph()
    stream, branch = graph.placeholder("stream"), graph.placeholder("branch")
    out = graph.call_function(
        AUTO, (contracts.boundary_,), {"stream": stream, "branch": branch}
    )
    written = graph.call_function(lambda t, i: t[i], (out, 1))
    if reads_old:
        written = graph.call_function(torch.ops.aten.add.Tensor, (written, stream))
    if stores_back:
        graph.call_function(torch.ops.aten.copy_.default, (stream, written))
    graph.output(written)
    return graph


@pytest.mark.parametrize("stores_back", [False, True])
def test_an_op_that_can_run_in_place_is_counted(stores_back):
    assert verify_lowering(piece(reads_old=False, stores_back=stores_back)) == 1


def test_an_old_value_read_again_is_refused():
    with pytest.raises(RuntimeError, match="would copy stream"):
        verify_lowering(piece(reads_old=True, stores_back=False))


def test_an_op_in_place_already_is_counted():
    graph = fx.Graph()
    value = graph.placeholder("value")
    graph.call_function(contracts.inline_, (value, 1))
    graph.output(value)
    assert verify_lowering(graph) == 1
