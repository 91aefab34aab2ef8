"""The entry point `vllm.general_plugins`: wraps a few of vLLM's methods, thinly.

vLLM calls `register` in every process, possibly several times. The wrappers look at the
engine's configuration at each call and hand over to the original unless eyesplice is
switched on in it: installed but not switched on has no effect.
"""

import functools
from collections.abc import Callable
from typing import Any

from eyesplice.integration import ledger, output_hook, scheduler_hook
from eyesplice.integration.private_name import PrivateName

_MARK = "__eyesplice_wraps__"


def register() -> None:
    """Wrap vLLM's methods in this process; safe to call again."""
    wrap(ledger.CREATE_ENGINE_CONFIG, _create_engine_config)
    wrap(ledger.INIT_BACKEND, _init_backend)
    wrap(ledger.INIT_DEVICE, _init_device)
    wrap(ledger.INPUT_PROCESSOR_INIT, _input_processor_init)
    wrap(ledger.PROCESS_INPUTS, _process_inputs)
    wrap(ledger.UPDATE_FROM_OUTPUT, scheduler_hook.update_from_output)
    wrap(ledger.PREEMPT_REQUEST, scheduler_hook.preempt_request)
    output_hook.attach()


def wrap(name: PrivateName, around: Callable[..., Any]) -> None:
    """Replace a method by `around(original, self, *args, **kwargs)`, once."""
    owner = name.owner()
    original = getattr(owner, name.attribute)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _MARK, original)
    setattr(owner, name.attribute, wrapper)


def _create_engine_config(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    from eyesplice.integration.activate import activate

    vllm_config = original(self, *args, **kwargs)
    activate(vllm_config)
    return vllm_config


def _init_backend(
    original: Callable[..., Any],
    self: Any,
    vllm_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from eyesplice.integration.compile_hook import splicing_backend

    backend = original(self, vllm_config, *args, **kwargs)
    is_encoder = bool(kwargs.get("is_encoder", args[1] if len(args) > 1 else False))
    return backend if is_encoder else splicing_backend(backend, vllm_config)


def _init_device(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    from eyesplice.integration.worker import prepare_worker

    prepare_worker(self.worker, self.vllm_config)
    return original(self, *args, **kwargs)


def _input_processor_init(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> None:
    from eyesplice.integration.frontend import open_front_end

    original(self, *args, **kwargs)
    open_front_end(self)


def _process_inputs(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    from eyesplice.integration.frontend import process_inputs

    return process_inputs(original, self, *args, **kwargs)
