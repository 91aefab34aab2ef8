"""One vLLM engine in a process of its own, driven by JSON lines on stdin.

The parent (`benchmarks/engines.py`) starts one for vanilla vLLM and one with eyesplice,
both on one GPU, and alternates between them: paired measurements in one run.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    """Start the engine named by the first line, then answer each further line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout: keep the answers apart from it.
    arguments = json.loads(sys.stdin.readline())
    if "additional_config" in arguments:
        _watch_tables()
    if arguments.pop("clock_hooks", False):
        from eyesplice.benchmarks.hook_clock import install

        _clocks.append(install())
    start = time.perf_counter()
    from vllm import LLM

    llm = LLM(**arguments)
    ready = {"seconds": time.perf_counter() - start, **describe(llm)}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("kind")
        result = _COMMANDS[kind](llm, **command)
        print(json.dumps(result), file=answers, flush=True)


def describe(llm: Any) -> dict[str, Any]:
    """What the engine is: versions, runner, CUDA graph mode, splice counts, memory."""
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    worker = llm.llm_engine.model_executor.driver_worker.worker
    session = getattr(worker, "eyesplice", None)
    report = session.require_report() if session else None
    on_gpu = torch.cuda.is_available()
    memory = getattr(worker, "shared_memory", None)
    shared = memory.num_bytes if memory else 0
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "runner": type(worker.model_runner).__module__,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "mode": str(config.compilation_config.mode),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "boundary_ops": report.num_boundary_ops if report else 0,
        "inline_ops": report.num_inline_ops if report else 0,
        "hooks": report.num_hooks if report else 0,
        "missing_sites": len(report.missing) if report else 0,
        "pass_ran": bool(session and session.pass_ran),
        "table_bytes": worker.eyesplice_buffers.num_bytes() if session else 0,
        "tables": table_bytes(worker.eyesplice_buffers) if session else {},
        "tables_measured": _measured.get("tables"),
        "bank_row_bytes": worker.eyesplice_buffers.bank[0].nbytes if session else 0,
        "bank_rows_used": len(session.deployment.registry.bank) if session else 0,
        "borrowed_bytes": shared,
        "not_borrowed": memory.failed if memory else None,
        "allocated_bytes": torch.cuda.memory_allocated() + shared if on_gpu else None,
        "compile_seconds": config.compilation_config.compilation_time,
    }


_measured: dict[str, int] = {}
_clocks: list[Any] = []


def _watch_tables() -> None:
    """Note how much device memory the allocation of the tables takes."""
    import torch

    from eyesplice.integration.buffers import Buffers

    allocate = Buffers.allocate

    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return allocate(*args, **kwargs)
        before = torch.cuda.memory_allocated()
        buffers = allocate(*args, **kwargs)
        _measured["tables"] = torch.cuda.memory_allocated() - before
        return buffers

    Buffers.allocate = watched  # type: ignore[method-assign]  # this process only


def table_bytes(buffers: Any) -> dict[str, int]:
    """Device memory of each table, in bytes; the parts of one allocation each."""
    import torch

    values = {field.name: getattr(buffers, field.name) for field in fields(buffers)}
    sizes = {k: v.nbytes for k, v in values.items() if isinstance(v, torch.Tensor)}
    parts = sum(sizes[name] for name in buffers.first)
    return sizes | {"words": sizes["words"] - parts}


def generate(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    extra_args: list[dict[str, Any] | None],
    logprobs: int | None = None,
) -> Any:
    """Greedy tokens of each prompt, what eyesplice answered, and logprobs if asked for."""
    from eyesplice.benchmarks.batches import greedy

    params = [greedy(max_tokens, _prepared(extra), logprobs) for extra in extra_args]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    whole = llm.generate(inputs, params, use_tqdm=False)
    outputs = [out.outputs[0] for out in whole]
    chosen = [
        [
            row[token].logprob
            for row, token in zip(out.logprobs, out.token_ids, strict=True)
        ]
        if out.logprobs
        else []
        for out in outputs
    ]
    tokens = [list(out.token_ids) for out in outputs]
    found = [getattr(out, "eyesplice", None) for out in whole]
    return {"tokens": tokens, "logprobs": chosen, "eyesplice": found}


def _prepared(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """`extra_args` as the engine's plugin wants them: vllm-lens takes its own objects."""
    if extra is None or "lens" not in extra:
        return None if extra is None else dict(extra)
    from safetensors.torch import load_file
    from vllm_lens import SteeringVector

    asked = extra["lens"]
    (tensor,) = load_file(asked["file"]).values()
    vector = SteeringVector(
        activations=tensor[None],
        layer_indices=[asked["layer"]],
        scale=asked["scale"],
    )
    return {"apply_steering_vectors": [vector]}


def decode(
    llm: Any,
    batch: int,
    prompt_tokens: int,
    steps: int,
    extra_args: list[dict[str, Any] | None],
    seed: int,
    name: str,
) -> Any:
    """Seconds of each decode step of a full batch, by the wall clock and on the device.

    Request i runs `extra_args[i % len(extra_args)]`. Steps with a prefill in them and
    the first few decode steps do not count. Device times are those of the CUDA graph,
    replayed in bursts after some steps (V2 runner only). Prompts follow from `seed`;
    `name` keeps the requests of two calls apart. `acted` counts the requests whose
    answer says that a write acted.
    """
    import gc

    from eyesplice.benchmarks.batches import SETTLE, add_batch
    from eyesplice.benchmarks.replays import Replays

    engine = llm.llm_engine
    add_batch(llm, f"{seed}-{name}", batch, prompt_tokens, steps, extra_args, seed)
    replays = Replays(llm)
    gc.collect()
    gc.disable()
    times: list[float] = []
    device: list[float] = []
    tokens: dict[str, int] = {}
    acted = 0
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - start
        for output in outputs:
            tokens[output.request_id] = len(output.outputs[0].token_ids)
            acted += output.finished and wrote(output)
        everyone = len(tokens) == batch and min(tokens.values()) > SETTLE
        if everyone and len(outputs) == batch and max(tokens.values()) < steps:
            times.append(elapsed)
            # After the step that follows a burst, the pipeline is full again.
            device = device or (replays.burst() if len(times) > 3 else [])
    gc.enable()
    replays.close()
    return {"seconds": times, "device_seconds": device, "acted": acted}


def wrote(output: Any) -> bool:
    """Whether an answer says that each of its writes acted on a token."""
    writes = (getattr(output, "eyesplice", None) or {}).get("writes", ())
    return bool(writes) and all(item["tokens"] for item in writes)


def prefill(
    llm: Any,
    prompts: int,
    prompt_tokens: int,
    max_tokens: int,
    extra_args: dict[str, Any] | None,
    seed: int,
) -> Any:
    """Seconds of a batch of prompts with short answers, and the rows it captured."""
    import gc
    import random

    from eyesplice.benchmarks.batches import drawn, greedy

    rng = random.Random(seed)
    inputs = [drawn(rng, prompt_tokens) for _ in range(prompts)]
    # Of its own: peers take their keys out.
    params = [greedy(max_tokens, _prepared(extra_args)) for _ in inputs]
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    gc.enable()
    answers = [getattr(output, "eyesplice", None) or {} for output in outputs]
    rows = sum(
        captured["shape"][0]
        for answer in answers
        for captured in answer.get("captures", {}).values()
    )
    errors = sorted({answer["error"] for answer in answers if "error" in answer})
    return {"seconds": seconds, "rows": rows, "errors": errors}


def cycles(llm: Any, **command: Any) -> Any:
    """Seconds of steps that hold prompts, see `prompts_child`."""
    from eyesplice.benchmarks import prompts_child

    return prompts_child.cycles(llm, **command)


def hooks(llm: Any, **command: Any) -> Any:
    """Seconds of eyesplice's hooks, see `host_child`."""
    from eyesplice.benchmarks.host_child import hook_seconds

    return hook_seconds(llm, _clocks[0], **command)


def calls(llm: Any, **command: Any) -> Any:
    """Launches and copies per step, see `host_child`."""
    from eyesplice.benchmarks import host_child

    try:
        return {"calls": host_child.calls(llm, **command), "error": None}
    except RuntimeError as error:  # A machine that does not let itself be profiled.
        return {"calls": None, "error": str(error)}


def kernels(llm: Any, **command: Any) -> Any:
    """The kernels of a decode step, see `trace_child`."""
    from eyesplice.benchmarks import trace_child

    return trace_child.kernels(llm, **command)


_COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "generate": generate,
    "decode": decode,
    "prefill": prefill,
    "cycles": cycles,
    "hooks": hooks,
    "calls": calls,
    "kernels": kernels,
}


if __name__ == "__main__":
    main()
