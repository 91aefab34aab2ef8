"""Runs the splice where each compilation mode shows the whole Dynamo graph.

VLLM_COMPILE (GPU default)     VllmBackend.__call__, before the split into pieces
DYNAMO_TRACE_ONCE + Inductor   Inductor's pre_grad_custom_pass
DYNAMO_TRACE_ONCE + "eager"    a Dynamo backend of our own in its place
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from eyesplice.integration import ledger
from eyesplice.integration.deployment import switched_on
from eyesplice.integration.session import current_session, is_open

_PRE_GRAD = "pre_grad_custom_pass"


def splicing_backend(backend: Any, vllm_config: Any) -> Any:
    """The backend to compile with: `backend` itself when not switched on.

    Args:
        backend: what vLLM chose: a name known to Dynamo, or a `VllmBackend`.
        vllm_config: the engine's configuration; the Inductor passes in it are edited.
    """
    config = switched_on(vllm_config)
    if config is None:
        return backend
    if backend == "inductor":
        from eyesplice.integration.pre_grad import PreGradSplice

        passes = vllm_config.compilation_config.inductor_compile_config
        passes.setdefault(_PRE_GRAD, PreGradSplice(config.salt))
        return backend
    if backend == "eager":
        return _eager
    _wrap_vllm_backend()
    return backend


def _eager(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Dynamo backend: the spliced graph, run as it is."""
    current_session().splice(graph)
    current_session().compile_ahead()
    return graph.forward


def _wrap_vllm_backend() -> None:
    from eyesplice.integration.plugin import wrap

    wrap(ledger.BACKEND_CALL, _vllm_backend_call)
    wrap(ledger.CACHE_DIRECTORY, _initialize_cache)


def _vllm_backend_call(
    original: Callable[..., Any],
    self: Any,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
) -> Any:
    if switched_on(self.vllm_config) is not None and not self.is_encoder:
        current_session().splice(graph)
    return original(self, graph, inputs)


def _initialize_cache(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, *args, **kwargs)
    if is_open():
        current_session().compile_ahead()
    return result
