"""Every name of vLLM that is not public API, once, with why and what to do when it goes.

Nothing else in this package names a private attribute of vLLM: code asks the ledger, so
that one page answers what a new version of vLLM can break. Checked against 0.25.1 and
0.32.0; `tests/integration/test_ledger.py` resolves every entry on the installed one.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Final


class LedgerError(RuntimeError):
    """The installed vLLM no longer has a name that eyesplice needs."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One name of vLLM.

    Attributes:
        module: where it is defined.
        path: attribute path below the module.
        why: what eyesplice does with it.
        versions: where it was seen, and how it differs.
        when_gone: what to do when a version lacks it.
    """

    module: str
    path: str
    why: str
    versions: str
    when_gone: str

    @property
    def attribute(self) -> str:
        """The last part of the path: the attribute to replace on its owner."""
        return self.path.rsplit(".", 1)[-1]

    def owner(self) -> Any:
        """The object that has the attribute.

        Raises:
            LedgerError: this vLLM has no such name.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            for part in self.path.split(".")[:-1]:
                owner = getattr(owner, part)
            getattr(owner, self.attribute)
        except (ImportError, AttributeError) as error:
            raise LedgerError(
                f"this vLLM has no {self.module}.{self.path} ({error}); eyesplice "
                f"uses it as follows: {self.why}. Next step: {self.when_gone}"
            ) from error
        return owner

    def get(self) -> Any:
        """The named object itself."""
        return getattr(self.owner(), self.attribute)


CREATE_ENGINE_CONFIG: Final = PrivateName(
    "vllm.engine.arg_utils",
    "EngineArgs.create_engine_config",
    why="wrapped: the switch is read and the salt set once the config is final",
    versions="0.25.1 and 0.32.0, same signature; documented for users, not for wrapping",
    when_gone="wrap whatever builds VllmConfig from EngineArgs",
)
INIT_BACKEND: Final = PrivateName(
    "vllm.config.compilation",
    "CompilationConfig.init_backend",
    why="wrapped: the one place that hands out a Dynamo backend in every mode",
    versions="0.25.1 and 0.32.0, same signature",
    when_gone="wrap the torch.compile call of TorchCompileWithNoGuardsWrapper",
)
BACKEND_CALL: Final = PrivateName(
    "vllm.compilation.backends",
    "VllmBackend.__call__",
    why="wrapped: sees the whole Dynamo graph before it is split into pieces",
    versions="0.25.1 and 0.32.0, same signature",
    when_gone="wrap vllm.compilation.backends.split_graph",
)
COMPILED_BASE: Final = PrivateName(
    "vllm.compilation.wrapper",
    "TorchCompileWithNoGuardsWrapper",
    why="isinstance: tells which module of the model is compiled as one graph",
    versions="0.25.1 and 0.32.0; a base that @support_torch_compile adds",
    when_gone="look for the decorator's new mark on the class",
)
ATTENTION_OPS: Final = PrivateName(
    "vllm.config.compilation",
    "CompilationConfig._attention_ops",
    why="read: names of the ops that mix tokens, which separate a layer's boundaries",
    versions="0.25.1 and 0.32.0; a list of qualified names",
    when_gone="use compilation_config.splitting_ops, empty in some modes",
)
INDUCTOR_PASS: Final = PrivateName(
    "vllm.compilation.passes.inductor_pass",
    "InductorPass",
    why="base of the pre-grad pass: vLLM hashes passes by its uuid()",
    versions="0.25.1 and 0.32.0",
    when_gone="use torch._inductor.custom_graph_pass.CustomGraphPass",
)
INIT_DEVICE: Final = PrivateName(
    "vllm.v1.worker.worker_base",
    "WorkerWrapperBase.init_device",
    why="wrapped: the first call after the worker exists. A worker process loads its "
    "plugins inside init_worker, so a wrapper of that one would come too late",
    versions="0.25.1 and 0.32.0; the worker is `self.worker`",
    when_gone="subclass the worker and set parallel_config.worker_cls",
)
INPUT_PROCESSOR_INIT: Final = PrivateName(
    "vllm.v1.engine.input_processor",
    "InputProcessor.__init__",
    why="wrapped: the front end reads the vectors when the engine starts, as workers do",
    versions="0.25.1 and 0.32.0; sets self.vllm_config",
    when_gone="read them at the first request that names one",
)
PROCESS_INPUTS: Final = PrivateName(
    "vllm.v1.engine.input_processor",
    "InputProcessor.process_inputs",
    why="wrapped: validates a request in the front end and sets its cache salt",
    versions="0.25.1 (request_id, prompt, params, ...) and 0.32.0 (more keywords)",
    when_gone="wrap Request.from_engine_core_request in the engine core",
)
V1_UPDATE_STATES: Final = PrivateName(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner._update_states",
    why="wrapped on the V1 runner: learns which requests began and ended",
    versions="0.25.1 and 0.32.0; argument scheduler_output",
    when_gone="read scheduler_output in a wrapper of execute_model",
)
V1_PREPARE_INPUTS: Final = PrivateName(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner._prepare_inputs",
    why="wrapped on the V1 runner: routes the step once batch and positions are final",
    versions="0.25.1 and 0.32.0, other results; uses input_batch.req_ids, "
    "query_start_loc.gpu and positions of the runner",
    when_gone="wrap _model_forward, which runs inside the forward context",
)
V1_DUMMY_RUN: Final = PrivateName(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner._dummy_run",
    why="wrapped on the V1 runner: profile, capture and idle runs must find idle rows",
    versions="0.25.1 and 0.32.0",
    when_gone="clear the maps at the end of every step instead",
)
V2_FINISH_REQUESTS: Final = PrivateName(
    "vllm.v1.worker.gpu.model_runner",
    "GPUModelRunner.finish_requests",
    why="wrapped on the V2 runner: learns which requests ended or were preempted",
    versions="0.25.1 and 0.32.0; argument scheduler_output",
    when_gone="subclass ModelState and use remove_request",
)
V2_ADD_REQUESTS: Final = PrivateName(
    "vllm.v1.worker.gpu.model_runner",
    "GPUModelRunner.add_requests",
    why="wrapped on the V2 runner: learns which requests began or were resumed",
    versions="0.25.1 and 0.32.0; argument scheduler_output",
    when_gone="subclass ModelState and use add_request",
)
V2_PREPARE_INPUTS: Final = PrivateName(
    "vllm.v1.worker.gpu.model_runner",
    "GPUModelRunner.prepare_inputs",
    why="wrapped on the V2 runner: routes the step; called for real batches only",
    versions="0.25.1 and 0.32.0; returns the InputBatch",
    when_gone="subclass ModelState and use preprocess_state",
)

ALL: Final = tuple(
    value for value in list(globals().values()) if isinstance(value, PrivateName)
)
