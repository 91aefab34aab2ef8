"""How a command's engine is set up, and how its errors are told."""

from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from eyesplice._errors import SpecError

KV_CACHE_BYTES: Final = 256 * 2**20
"""Enough for a few hundred tokens of any model."""

_MAX_TOKENS: Final = 512


def on_cpu() -> bool:
    """Whether this vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def engine_options(model: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a small, quickly started engine.

    On a CPU the graph is run as Dynamo traced it (mode 2, backend "eager"), which starts
    several times sooner than with Inductor. On a GPU vLLM compiles as it does by default.
    """
    options: dict[str, Any] = {
        "model": model,
        "max_model_len": min(_MAX_TOKENS, longest(model)),
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "disable_log_stats": True,
    }
    if on_cpu():
        options["compilation_config"] = {"mode": 2, "backend": "eager"}
        options["max_num_batched_tokens"] = _MAX_TOKENS
        options["max_num_seqs"] = 8
    else:
        # The cache has a size of its own: let a busy GPU have the rest.
        options["gpu_memory_utilization"] = 0.2
    return options


def longest(model: str) -> int:
    """Positions that the model allows, `_MAX_TOKENS` where only vLLM can tell."""
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError, KeyError):
        return _MAX_TOKENS
    return int(getattr(text, "max_position_embeddings", None) or _MAX_TOKENS)


def in_one_line(error: BaseException) -> str:
    """The message that a user can act on: a refusal's own, else the error's."""
    for cause in _causes(error):
        if isinstance(cause, SpecError):
            return str(cause)
    return f"{type(error).__name__}: {' '.join(_text(error).split())}"


def _text(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"]
    return str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, nearest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # Dynamo wraps what a backend raises.
        inner = getattr(error, "inner_exception", None)
        error = inner or error.__cause__ or error.__context__
