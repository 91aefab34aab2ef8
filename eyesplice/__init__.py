"""Steer and read a model's activations inside vLLM's compiled graph.

Importing this package loads neither vLLM nor Triton nor torch; the rooms behind it
(`eyesplice.ops`, `eyesplice.fx_passes`, `eyesplice.integration`) load what they need
when one of their names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from eyesplice._errors import SpecError
from eyesplice._version import __version__

if TYPE_CHECKING:
    from eyesplice.fx_passes.app_files import load_app
    from eyesplice.fx_passes.apps import App
    from eyesplice.fx_passes.builder import read, write
    from eyesplice.integration.deployed import deployed

__all__ = [
    "App",
    "SpecError",
    "__version__",
    "deployed",
    "load_app",
    "read",
    "splice_pass",
    "write",
]

_LAZY: Final = {
    "App": "eyesplice.fx_passes.apps",
    "deployed": "eyesplice.integration.deployed",
    "load_app": "eyesplice.fx_passes.app_files",
    "read": "eyesplice.fx_passes.builder",
    "write": "eyesplice.fx_passes.builder",
}


def __getattr__(name: str) -> Any:
    """A name of `__all__` that lives in a room, loaded when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
