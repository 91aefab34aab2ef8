"""Every name of vLLM that is not public API, once, with why and what to do when it goes.

Nothing else in this package names a private attribute of vLLM: code asks the ledger, so
that one page answers what a new version of vLLM can break. Checked against 0.25.1 and
0.32.0; `tests/integration/test_ledger.py` resolves every entry on the installed one.
"""

from typing import Final

from eyesplice.integration.private_name import PrivateName

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
CACHE_DIRECTORY: Final = PrivateName(
    "vllm.compilation.backends",
    "CompilerManager.initialize_cache",
    why="wrapped: sets Triton's cache directory; kernels are compiled ahead from then on",
    versions="0.25.1 and 0.32.0; called by VllmBackend.__call__ before the split",
    when_gone="compile ahead right after the splice, for a cache that may be another",
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
MOE_RUNNER: Final = PrivateName(
    "vllm.model_executor.layers.fused_moe.runner.moe_runner",
    "MoERunner",
    why="isinstance: tells the modules whose op may run the router inside; read are "
    "gate, moe_config, _fse_fuse_gate and _forward_entry (an op, or Python on CPU)",
    versions="0.25.1 and 0.32.0; calls self.gate(hidden_states) in _forward_impl unless "
    "_fse_fuse_gate, in which case one product gives logits and the shared gate",
    when_gone="look where the experts' op computes router_logits",
)
ATTENTION_LAYER: Final = PrivateName(
    "vllm.model_executor.layers.attention_layer_base",
    "AttentionLayerBase",
    why="isinstance: tells the modules that mix tokens, where there is no graph",
    versions="0.25.1 and 0.32.0; base of Attention, MLAAttention and the Mamba mixers",
    when_gone="use the modules in compilation_config.static_forward_context",
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
GENERATE_ROUTES: Final = PrivateName(
    "vllm.entrypoints.generate.api_router",
    "register_generate_api_routers",
    why="wrapped: adds the routes to the server's own app, behind its API key",
    versions="0.25.1 and 0.32.0; imported by build_app each time that it runs, so that "
    "the wrapper is found however the server was started",
    when_gone="wrap build_app where the server's entry module holds it",
)
CHAT_FULL: Final = PrivateName(
    "vllm.entrypoints.openai.chat_completion.serving",
    "OpenAIServingChat.chat_completion_full_generator",
    why="wrapped: adds the answer to a chat's response",
    versions="0.25.1 and 0.32.0; (request, result_generator, ...), a coroutine",
    when_gone="wrap create_chat_completion",
)
CHAT_STREAM: Final = PrivateName(
    "vllm.entrypoints.openai.chat_completion.serving",
    "OpenAIServingChat.chat_completion_stream_generator",
    why="wrapped: adds the answer to chunks of a chat's stream",
    versions="0.25.1 and 0.32.0; (request, result_generator, ...), yields SSE text",
    when_gone="wrap create_chat_completion",
)
COMPLETION_FULL: Final = PrivateName(
    "vllm.entrypoints.openai.completion.serving",
    "OpenAIServingCompletion.request_output_to_completion_response",
    why="wrapped: adds the answer to a completion's response",
    versions="0.25.1 and 0.32.0; (final_res_batch, ...)",
    when_gone="wrap create_completion",
)
COMPLETION_STREAM: Final = PrivateName(
    "vllm.entrypoints.openai.completion.serving",
    "OpenAIServingCompletion.completion_stream_generator",
    why="wrapped: adds the answer to chunks of a completion's stream",
    versions="0.25.1 and 0.32.0; (request, engine_inputs, result_generator, ...), the "
    "generator gives (prompt index, output), yields SSE text",
    when_gone="wrap create_completion",
)
CHAT_BATCH: Final = PrivateName(
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "OpenAIServingChatBatch.chat_completion_full_generator_batch",
    why="wrapped: adds the answers to the response of /v1/chat/completions/batch",
    versions="0.25.1 and 0.32.0; (request, generators, ...), a coroutine",
    when_gone="wrap create_batch_chat_completion",
)
MESSAGES_FULL: Final = PrivateName(
    "vllm.entrypoints.anthropic.serving",
    "AnthropicServingMessages.messages_full_converter",
    why="wrapped: takes the answer over from the chat that /v1/messages is made of",
    versions="0.25.1 and 0.32.0; the response that it gives keeps no unknown fields",
    when_gone="wrap create_messages",
)
MESSAGES_STREAM: Final = PrivateName(
    "vllm.entrypoints.anthropic.serving",
    "AnthropicServingMessages.message_stream_converter",
    why="wrapped: likewise, the answer of a stream",
    versions="0.25.1 and 0.32.0; takes chunks of a chat's stream, yields SSE text",
    when_gone="wrap create_messages",
)
RESPONSES_TURNS: Final = PrivateName(
    "vllm.entrypoints.openai.responses.serving",
    "OpenAIServingResponses._generate_with_builtin_tools",
    why="wrapped: sees the outputs of /v1/responses, by `append_output` of its context",
    versions="0.25.1 and 0.32.0, other arguments; one request of the engine a turn",
    when_gone="wrap append_output of the contexts",
)
RESPONSES_FULL: Final = PrivateName(
    "vllm.entrypoints.openai.responses.serving",
    "OpenAIServingResponses.responses_full_generator",
    why="wrapped: adds the answer to a response, which a stream ends with too",
    versions="0.25.1 and 0.32.0; the context is the fourth argument; a coroutine",
    when_gone="wrap create_responses",
)
CHAT_BEAMS: Final = PrivateName(
    "vllm.entrypoints.openai.chat_completion.protocol",
    "ChatCompletionRequest.to_beam_search_params",
    why="wrapped: beam search drops vllm_xargs, so a request that has our key is refused",
    versions="0.25.1 and 0.32.0; uses the request's vllm_xargs",
    when_gone="refuse use_beam_search in create_chat_completion",
)
COMPLETION_BEAMS: Final = PrivateName(
    "vllm.entrypoints.openai.completion.protocol",
    "CompletionRequest.to_beam_search_params",
    why="wrapped: as CHAT_BEAMS",
    versions="0.25.1 and 0.32.0; uses the request's vllm_xargs",
    when_gone="refuse use_beam_search in create_completion",
)
BEAMS_ONLINE: Final = PrivateName(
    "vllm.entrypoints.generate.beam_search.online",
    "BeamSearchOnlineMixin.beam_search",
    why="wrapped: refused while there are default apps",
    versions="0.25.1 and 0.32.0; uses engine_client.input_processor of the server",
    when_gone="refuse use_beam_search in create_completion and create_chat_completion",
)
BEAMS_OFFLINE: Final = PrivateName(
    "vllm.entrypoints.generate.beam_search.offline",
    "BeamSearchOfflineMixin.beam_search",
    why="wrapped: as BEAMS_ONLINE",
    versions="0.25.1 and 0.32.0; a base of LLM, uses llm_engine.input_processor",
    when_gone="wrap LLM.beam_search",
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
    why="wrapped on the V1 runner: profile, capture and idle runs must find idle rows; "
    "called on both to watch the modules of a model without a graph",
    versions="0.25.1 and 0.32.0; V2 has it too and wants skip_attn before the KV cache",
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
EXECUTE_MODEL: Final = PrivateName(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner.execute_model",
    why="wrapped on both runners: results of a step whose output it gives itself; tells "
    "V2's dummy runs by their keyword",
    versions="0.25.1 and 0.32.0; gives None when sample_tokens is to follow",
    when_gone="wrap what the worker's execute_model calls",
)
SAMPLE_TOKENS: Final = PrivateName(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner.sample_tokens",
    why="wrapped on both runners: starts to copy a step's results, adds them to its output",
    versions="0.25.1 and 0.32.0; gives a ModelRunnerOutput or an object with get_output",
    when_gone="wrap what the worker's sample_tokens calls",
)
UPDATE_FROM_OUTPUT: Final = PrivateName(
    "vllm.v1.core.sched.scheduler",
    "Scheduler.update_from_output",
    why="wrapped: adds results up per request, and sends them with the outputs",
    versions="0.25.1 and 0.32.0; (scheduler_output, model_runner_output); uses `requests` "
    "of the scheduler and `outputs` of the results; no subclass replaces it",
    when_gone="wrap what makes EngineCoreOutput objects",
)
PREEMPT_REQUEST: Final = PrivateName(
    "vllm.v1.core.sched.scheduler",
    "Scheduler._preempt_request",
    why="wrapped: sets skip_reading_prefix_cache of a request that has our key, so that "
    "all its tokens are computed again, and counted",
    versions="0.25.1 (request, timestamp) and 0.32.0 (..., drop_stale_output); "
    "KVCacheManager reads the attribute whenever it looks for a request's blocks; 0.25.1 "
    "asks a KV connector for tokens all the same, and 0.32.0 takes none from it then",
    when_gone="set skip_reading_prefix_cache at admission; a preempted request that "
    "reads the cache has an `error` in its answer",
)
DECODE: Final = PrivateName(
    "vllm.v1.serial_utils",
    "MsgpackDecoder.decode",
    why="wrapped: arrays inside kv_transfer_params arrive as (dtype, shape, data), with "
    "a number among the message's parts for data of more than a few bytes",
    versions="0.25.1 and 0.32.0; (bufs), one buffer or a sequence of parts",
    when_gone="send captured rows as bytes inside the message",
)
PROCESS_OUTPUTS: Final = PrivateName(
    "vllm.v1.engine.output_processor",
    "OutputProcessor.process_outputs",
    why="wrapped: takes results out of the outputs that arrive from the engine core",
    versions="0.25.1 and 0.32.0; (engine_core_outputs, ...)",
    when_gone="wrap what the front end calls for each batch of EngineCoreOutputs",
)
PROCESSOR_ADD_REQUEST: Final = PrivateName(
    "vllm.v1.engine.output_processor",
    "OutputProcessor.add_request",
    why="wrapped: learns the id that the engine core knows a request by",
    versions="0.25.1 and 0.32.0; (request, prompt, parent_req, request_index, ...)",
    when_gone="wrap InputProcessor.assign_request_id and ParentRequest.get_child_info",
)
PROCESSOR_ABORT: Final = PrivateName(
    "vllm.v1.engine.output_processor",
    "OutputProcessor.abort_requests",
    why="wrapped: forgets what aborted requests asked for",
    versions="0.25.1 and 0.32.0; returns the engine core's ids of the aborted requests",
    when_gone="forget a request when its output queue closes",
)
NEW_COMPLETION_OUTPUT: Final = PrivateName(
    "vllm.v1.engine.output_processor",
    "RequestState._new_completion_output",
    why="wrapped: puts the answer on each completion, the one place that makes them",
    versions="0.25.1 and 0.32.0; (token_ids, finish_reason, stop_reason); uses request_id "
    "and output_kind",
    when_gone="wrap RequestState.make_request_output",
)
NEW_REQUEST_OUTPUT: Final = PrivateName(
    "vllm.v1.engine.output_processor",
    "RequestState._new_request_output",
    why="wrapped: puts the completions' answer on the request's output",
    versions="0.25.1 and 0.32.0; (external_req_id, outputs, ...)",
    when_gone="wrap RequestState.make_request_output",
)
MERGE_OUTPUTS: Final = PrivateName(
    "vllm.outputs",
    "RequestOutput.add",
    why="wrapped: outputs that a slow client takes as one keep the answers of both",
    versions="0.25.1 and 0.32.0; (next_output, aggregate)",
    when_gone="look how RequestOutputCollector merges outputs",
)

ALL: Final = tuple(
    value for value in list(globals().values()) if isinstance(value, PrivateName)
)
