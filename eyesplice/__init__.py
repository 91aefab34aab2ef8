"""Steer a model's activations inside vLLM's compiled graph.

Importing this package loads neither vLLM nor Triton; the rooms behind it
(`eyesplice.ops`, `eyesplice.fx_passes`, `eyesplice.integration`) load what they
need when they are first used.
"""

from typing import Any

from eyesplice._errors import SpecError
from eyesplice._version import __version__

__all__ = ["SpecError", "__version__", "splice_pass"]


def splice_pass(graph: Any) -> None:
    """vLLM compilation pass that switches eyesplice on and checks its work.

    Name it in vLLM's own configuration, as
    `{"inductor_passes": {"post_grad_custom_post_pass": "eyesplice.splice_pass"}}`.
    vLLM resolves that string in this module's dictionary, hence a plain function here.
    The splice itself happens earlier, on the whole Dynamo graph; this pass runs on each
    piece after Inductor's own passes.

    Args:
        graph: `torch.fx.Graph` of one compiled piece, after Inductor's passes.

    Raises:
        RuntimeError: a spliced op would be lowered with a copy of its stream.
    """
    from eyesplice.integration.verify_lowering import verify_lowering

    verify_lowering(graph)
