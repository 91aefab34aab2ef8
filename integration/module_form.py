"""Arms a model that runs without a graph: finds its values, proves them, hooks them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.report import SpliceReport
from eyesplice.integration import ledger
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.module_finder import Decoder, Finder
from eyesplice.integration.module_hooks import arm
from eyesplice.integration.module_proof import Proof
from eyesplice.integration.rehearsal import Recording, recorded

_TOKENS = 8


def arm_modules(
    model: nn.Module,
    plan: SplicePlan,
    buffers: Buffers,
    *,
    heads_width: int,
    rehearse: Callable[[], None],
    idle: Callable[[], bool],
) -> SpliceReport:
    """Hook every wanted site that can be.

    Args:
        model: the loaded model; `plan.layers_path` starts from it.
        plan: the wanted sites.
        buffers: the tables.
        heads_width: elements per token of all heads.
        rehearse: runs the model once on a few tokens of no request.
        idle: whether this step has nothing to do.

    Returns:
        The site table.
    """
    decoder = Decoder(model, plan.layers_path)
    with recorded(decoder.watched()) as calls:
        rehearse()
        finder = Finder(decoder, Recording(calls))
        ranks = plan.tensor_parallel_size
        places = finder.find(heads_width, plan.num_experts, ranks)
        calls.clear()
    Proof(decoder, places).run(rehearse)
    places.keep(plan.wanted)
    arm(model, places, buffers, plan.families, idle)
    return places.report(plan.wanted)


def rehearsal_of(runner: Any, vllm_config: Any) -> Callable[[], None]:
    """A run of the model as vLLM profiles it: a few tokens, no KV cache.

    Args:
        runner: V1's or V2's, with a loaded model.
        vllm_config: the engine's configuration.
    """
    num_tokens = min(_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens)
    dummy_run = getattr(runner, ledger.V1_DUMMY_RUN.attribute)
    without_cache = {"is_profile": True, "skip_eplb": True}
    if not hasattr(runner, ledger.V1_PREPARE_INPUTS.attribute):
        without_cache["skip_attn"] = True

    def rehearse() -> None:
        dummy_run(num_tokens, **without_cache)

    return rehearse
