"""Switches an engine's configuration on, once vLLM has made it."""

import logging
from typing import Any

from eyesplice._errors import SpecError
from eyesplice.integration.config import KEY, requested
from eyesplice.integration.deployment import Deployment, compiles
from eyesplice.ops.token_map import MAX_ROWS

logger = logging.getLogger("vllm.eyesplice")


def activate(vllm_config: Any) -> None:
    """Validate the configuration, refuse what cannot be spliced, and set the salt.

    Does nothing when neither `additional_config`, EYESPLICE_CONFIG nor the pass flag
    asks for eyesplice.

    Args:
        vllm_config: a final `VllmConfig`; edited in place.

    Raises:
        SpecError: a malformed configuration, apps or vectors that cannot be served, or
            an engine mode without a graph to splice.
    """
    compilation = vllm_config.compilation_config
    config = requested(vllm_config.additional_config, compilation.inductor_passes)
    if config is None:
        return
    _refuse_unsupported(vllm_config)
    if compiles(vllm_config):
        # The norms must stay one node each. vLLM keeps them so wherever its own compiler
        # runs; on CPU it would trace their arithmetic instead.
        compilation.ir_enable_torch_wrap = True
    salt = Deployment.build(config, vllm_config).salt(vllm_config)
    config = config.model_copy(update={"salt": salt})
    additional = dict(vllm_config.additional_config or {})
    additional[KEY] = config.model_dump(exclude_defaults=True)
    vllm_config.additional_config = additional
    logger.info("eyesplice is switched on (salt %s)", config.salt)


def _refuse_unsupported(vllm_config: Any) -> None:
    if vllm_config.speculative_config is not None:
        method = getattr(vllm_config.speculative_config, "method", None)
        raise SpecError(
            "speculative_config",
            method or "a draft model",
            "none: drafted tokens that are rejected would count in receipts, scores and "
            "gates",
            "start the engine without speculative_config",
        )
    _refuse_many_requests(vllm_config.scheduler_config.max_num_seqs)
    from vllm.config import CompilationMode

    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    if (
        vllm_config.lora_config is not None
        and vllm_config.device_config.device_type == "cpu"
    ):
        raise SpecError(
            "LoRA on CPU",
            True,
            "LoRA on a GPU: on CPU it disables compilation",
            "serve without LoRA",
        )
    if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
        raise SpecError(
            "compilation mode",
            "STOCK_TORCH_COMPILE",
            "VLLM_COMPILE (3) or DYNAMO_TRACE_ONCE (2)",
            "leave the compilation mode to vLLM",
        )
    if parallel.pipeline_parallel_size > 1:
        raise SpecError(
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            "1",
            "use tensor parallelism",
        )
    if getattr(parallel, "enable_dbo", False):
        raise SpecError(
            "enable_dbo",
            True,
            "False: dual-batch overlap splits the tokens of a step",
            "switch it off",
        )


def _refuse_many_requests(max_num_seqs: int) -> None:
    """Every request may have a program of its own, in a row that a map can name."""
    limit = MAX_ROWS - 1
    if max_num_seqs > limit:
        raise SpecError(
            "max_num_seqs",
            max_num_seqs,
            f"{limit} at most: a token's word has no room for more programs",
            f"start the engine with max_num_seqs {limit} or less",
        )
