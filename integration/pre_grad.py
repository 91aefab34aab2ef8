"""The splice as an Inductor pass, for the mode in which Inductor sees the whole graph."""

from torch import fx

from eyesplice.integration import ledger
from eyesplice.integration.session import current_session


class PreGradSplice(ledger.INDUCTOR_PASS.get()):  # type: ignore[misc]
    """Inductor `pre_grad_custom_pass` of one deployment, hashed by its salt."""

    def __init__(self, salt: str) -> None:
        self._salt = salt

    def __call__(self, graph: fx.Graph) -> None:
        """Splice the graph in place."""
        assert graph.owning_module is not None
        current_session().splice(graph.owning_module)
        current_session().compile_ahead()
        _without_inplace_norms(graph)

    def uuid(self) -> str:
        """The deployment's salt: equal salts splice alike."""
        return f"eyesplice-{self._salt}"


def _without_inplace_norms(graph: fx.Graph) -> None:
    """Retarget the norms left alone to their functional overload.

    `maybe_inplace` is turned into it by a pass that vLLM's own compiler runs and stock
    Inductor does not.
    """
    for node in graph.nodes:
        overload = getattr(node.target, "_overloadname", "")
        if node.op == "call_function" and overload == "maybe_inplace":
            node.target = node.target.overloadpacket.default
