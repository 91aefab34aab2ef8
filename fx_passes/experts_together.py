"""Router writes that are well each, and what they leave of a layer's experts together."""

from collections.abc import Sequence

from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.experts import check_numbers
from eyesplice.fx_passes.writes import Write


def check_together(writes: Sequence[tuple[str, Write]], context: Context) -> None:
    """Refuse router writes that leave too few experts together.

    Those that act on every token count: of others nobody knows whether they meet. The
    last write that names an expert decides over it.

    Args:
        writes: in the order in which they run, each with what errors call it.
        context: what the model offers.

    Raises:
        SpecError: naming the write with which it happens.
    """
    chosen: dict[int, dict[int, bool]] = {}
    for path, write in writes:
        if write.kernel != "router" or write.when != "all" or write.gate is not None:
            continue
        assert write.activate is not None and write.deactivate is not None
        named = zip(write.layers, write.activate, write.deactivate, strict=True)
        for layer, up, down in named:
            of_layer = chosen.setdefault(layer, {})
            of_layer |= dict.fromkeys(up, True) | dict.fromkeys(down, False)
            ups = sum(of_layer.values())
            check_numbers(layer, ups, len(of_layer) - ups, context, f"{path}.")
