"""Prepares a worker: tables and hooks once the model is loaded, a check once compiled."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.integration import ledger
from eyesplice.integration.anchors import anchor_layers, find_layers, register
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.deployment import Deployment, compiles, switched_on
from eyesplice.integration.hidden_routers import find_hidden_routers, hook_routers
from eyesplice.integration.module_finder import find_layers_without_graph
from eyesplice.integration.module_form import arm_modules, rehearsal_of
from eyesplice.integration.own_ops import import_modules
from eyesplice.integration.results import Results
from eyesplice.integration.router import Router
from eyesplice.integration.runners import RunnerHooks
from eyesplice.integration.session import Session, open_session
from eyesplice.ops.site_tables import tables_of

logger = logging.getLogger("vllm.eyesplice")

_PREPARED = "eyesplice_prepared"
_LOADING_ANEW = ("reload_weights", "finish_weight_update")
_MOE_OPS = frozenset({"vllm::moe_forward", "vllm::moe_forward_shared"})


def prepare_worker(worker: Any, vllm_config: Any) -> None:
    """Arrange that the worker's model is spliced; nothing when not switched on.

    Args:
        worker: a new worker whose model is not loaded; safe to pass again.
        vllm_config: the engine's configuration.

    Raises:
        SpecError: a module of `op_modules` that cannot be imported.
    """
    config = switched_on(vllm_config)
    if config is None or getattr(worker, _PREPARED, False):
        return
    # Before anything compiled is loaded that names their ops.
    import_modules(config.op_modules)
    setattr(worker, _PREPARED, True)
    _after(worker, "load_model", lambda: attach(worker, vllm_config))
    for compiling in ("determine_available_memory", "compile_or_warm_up_model"):
        _unwrap_refusals(worker, compiling)
    _after(
        worker, "compile_or_warm_up_model", lambda: worker.eyesplice.require_report()
    )
    for loading in filter(partial(hasattr, worker), _LOADING_ANEW):
        _after(
            worker, loading, lambda: register(getattr(worker, "eyesplice_anchors", ()))
        )


def _after(worker: Any, method: str, then: Callable[[], object]) -> None:
    original = getattr(worker, method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    setattr(worker, method, wrapper)


def _unwrap_refusals(worker: Any, method: str) -> None:
    """Let a refusal of the pass reach the user bare of the compiler's error around it."""
    original = getattr(worker, method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            raise refusal from None

    setattr(worker, method, wrapper)


def _refusal(error: BaseException | None) -> SpecError | None:
    while error is not None and not isinstance(error, SpecError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def attach(worker: Any, vllm_config: Any) -> None:
    """Allocate the tables, bring them to the loaded model and hook the runner.

    Raises:
        SpecError: vectors that cannot be registered, a user's op that breaks its
            contract or needs a graph where there is none, or a named site that a model
            without a graph lacks.
        LookupError: a model without a list of layers.
    """
    deployment = Deployment.of(vllm_config)
    assert deployment is not None
    runner = worker.model_runner
    root, layers_path = _layers(runner.get_model(), deployment, vllm_config)
    plan = _plan(deployment, root, layers_path, vllm_config)
    buffers = _allocate(deployment, plan, vllm_config, worker.device)
    results = Results(
        buffers,
        deployment.shape.widths(),
        answers=_answers(worker, vllm_config.parallel_config),
    )
    tables = tables_of(buffers.program[0]) if buffers.index else None
    session = Session(deployment, plan, tables)
    open_session(session)
    contexts: list[Context] = []

    def context() -> Context:
        if not contexts:
            contexts.append(deployment.context(session.require_report()))
        return contexts[0]

    hooks = RunnerHooks(Router(buffers, results), results, context)
    hooks.router.warm_up()
    if compiles(vllm_config):
        weights = deployment.custom_weights(worker.device)
        worker.eyesplice_anchors = anchor_layers(root, plan, buffers, weights)
        hook_routers(root, plan, buffers)
    else:
        report = arm_modules(
            root,
            plan,
            buffers,
            heads_width=deployment.shape.heads_width,
            rehearse=rehearsal_of(runner, vllm_config),
            idle=_idle(hooks.router, vllm_config),
        )
        session.adopt(report)
    hooks.attach(runner)
    worker.eyesplice = session
    worker.eyesplice_router = hooks.router
    worker.eyesplice_buffers = buffers
    logger.info(
        "eyesplice: tables of %.1f MiB, vectors: %d, decoder layers: model path %r",
        buffers.num_bytes() / 2**20,
        len(deployment.registry.names()),
        layers_path,
    )


def _layers(
    model: nn.Module, deployment: Deployment, vllm_config: Any
) -> tuple[nn.Module, str]:
    """The module that paths start from, and the path of its decoder layers."""
    if compiles(vllm_config):
        return find_layers(model)
    return find_layers_without_graph(model, deployment.shape.num_layers)


def _idle(router: Router, vllm_config: Any) -> Callable[[], bool]:
    """Whether a step without a graph has nothing to do.

    What a CUDA graph captures must be right for every replay, so there nothing is left
    out.
    """
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    if mode not in (None, CUDAGraphMode.NONE):
        return lambda: False
    return lambda: router.idle


def _answers(worker: Any, parallel: Any) -> bool:
    """Whether the engine takes its outputs from this worker.

    It takes them from one rank of a tensor-parallel group, unless each rank is an engine
    of its own.
    """
    own_engine = parallel.distributed_executor_backend == "external_launcher"
    return bool(worker.is_driver_worker) or own_engine


def _plan(
    deployment: Deployment, root: nn.Module, layers_path: str, vllm_config: Any
) -> SplicePlan:
    shape, parallel = deployment.shape, vllm_config.parallel_config
    splitting = vllm_config.compilation_config.splitting_ops or ()
    default = ledger.ATTENTION_OPS.get()
    return SplicePlan(
        layers_path=layers_path,
        num_layers=shape.num_layers,
        wanted=deployment.wanted,
        attention_ops=frozenset({*splitting, *default}) - _CACHE_UPDATES,
        moe_ops=_MOE_OPS,
        num_experts=shape.num_experts,
        hidden_routers=find_hidden_routers(
            root, layers_path, sequence_parallel=parallel.use_sequence_parallel_moe
        ),
        tensor_parallel_size=parallel.tensor_parallel_size,
        defer_adds=_inductor_defers(deployment, vllm_config),
        families=int(deployment.families),
        custom=deployment.custom,
    )


def _inductor_defers(deployment: Deployment, vllm_config: Any) -> bool:
    """Whether vanilla's stream is not rounded between attention and MLP.

    In fp32 both are the same, so that the engines of tests run the same ops.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    by_inductor = compilation.mode == CompilationMode.VLLM_COMPILE
    by_inductor = by_inductor and compilation.backend == "inductor"
    return by_inductor or deployment.dtype == torch.float32


_CACHE_UPDATES = frozenset(
    {"vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"}
)
"""Splitting ops that only store keys and values; they give no attention output."""


def _allocate(
    deployment: Deployment, plan: SplicePlan, vllm_config: Any, device: torch.device
) -> Buffers:
    sizes = deployment.buffer_sizes(vllm_config)
    buffers = Buffers.allocate(plan, sizes, dtype=deployment.dtype, device=device)
    rows = deployment.registry.bank
    buffers.bank[: len(rows)].copy_(rows)
    buffers.token_sets.copy_(deployment.token_set_rows())
    return buffers
