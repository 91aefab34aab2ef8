"""Command of an engine's process: the kernels of one decode step, as they were run."""

from typing import Any, Final

from eyesplice.benchmarks.host_child import steps
from eyesplice.benchmarks.replays import Replays

_REPLAYS: Final = 5


def kernels(llm: Any, batch: int, extra_args: list[dict[str, Any] | None]) -> Any:
    """`[start us, duration us, name]` of every kernel of some replays, in their order.

    The replays follow one another without the host in between. Empty without a CUDA
    graph of the whole step.
    """
    replays = Replays(llm)
    found: list[list[Any]] = []
    command = {"prompt_tokens": 64, "num_steps": 4, "seed": batch}
    for number in steps(llm, batch, extra_args=extra_args, **command):
        if number == 3 and replays.ready:
            found = _traced(replays)
    replays.close()
    return {"replays": _REPLAYS, "kernels": found}


def _traced(replays: Replays) -> list[list[Any]]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replays.again(_REPLAYS)
        torch.cuda.synchronize()
    kernels = [
        [event.time_range.start, event.time_range.elapsed_us(), event.name]
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return sorted(kernels)
