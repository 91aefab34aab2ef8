"""Commands of an engine's process about its host: hook times, launches and copies."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from eyesplice.benchmarks.batches import SETTLE, add_batch
from eyesplice.benchmarks.hook_clock import HookClock

_LAUNCHES: Final = frozenset(
    {
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
    }
)
_COPIES: Final = {"Memcpy HtoD": "host_to_device", "Memcpy DtoH": "device_to_host"}


def steps(
    llm: Any,
    batch: int,
    prompt_tokens: int,
    num_steps: int,
    extra_args: list[dict[str, Any] | None],
    seed: int,
) -> Iterator[int]:
    """Run a full batch to its end; yields the number of each decode step that counts.

    The caller's code between two values runs before that step.
    """
    engine = llm.llm_engine
    length = num_steps + 3 * SETTLE
    add_batch(llm, f"host-{seed}", batch, prompt_tokens, length, extra_args, seed)
    tokens: dict[str, int] = {}
    number = 0
    while engine.has_unfinished_requests():
        # Not once one has ended: others may have waited for its place.
        full = len(tokens) == batch and max(tokens.values()) < length
        if full and min(tokens.values()) > SETTLE and number < num_steps:
            yield number
            number += 1
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)


def hook_seconds(llm: Any, clock: HookClock, **command: Any) -> dict[str, Any]:
    """Seconds of every hook in each decode step of a full batch."""
    found: list[dict[str, float]] = []
    for number in steps(llm, **command):
        taken = clock.take()
        if number:
            found.append(taken)
        clock.on = True
    clock.on = False
    clock.take()
    names = sorted({name for step in found for name in step})
    return {name: [step.get(name, 0.0) for step in found] for name in names}


def calls(llm: Any, **command: Any) -> dict[str, float] | None:
    """Launches and copies that the host asks for, per decode step; None without CUDA.

    Kernels inside a CUDA graph are no launches of the host's; its replay is one.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        for _ in steps(llm, **command):
            pass
        return None
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = profile(activities=activities)
    num_steps = command["num_steps"]
    for number in steps(llm, **command):
        # The last counted step ends where the next would begin.
        if number == 0:
            torch.cuda.synchronize()
            profiler.start()
        if number == num_steps - 1:
            torch.cuda.synchronize()
            profiler.stop()
    return _counted(profiler, num_steps - 1)


def _counted(profiler: Any, num_steps: int) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.key in _LAUNCHES:
            counts["launches"] += event.count
        if event.key == "cudaGraphLaunch":
            counts["graph_replays"] += event.count
        for prefix, name in _COPIES.items():
            if event.key.startswith(prefix):
                counts[name] += event.count
    names = ("launches", "graph_replays", *_COPIES.values())
    return {name: counts[name] / num_steps for name in names}
