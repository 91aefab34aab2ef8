"""Device time of a step: bursts of replays of its CUDA graph."""

from typing import Any, Final

_BURSTS: Final = 5
_REPLAYS: Final = 10


class Replays:
    """Replays the last full CUDA graph again and again, without the host in between.

    Between two single replays the device waits for the host, and an event before a
    replay is passed long before the replay begins: what is then measured is the host.
    """

    def __init__(self, llm: Any) -> None:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        self._manager = getattr(worker.model_runner, "cudagraph_manager", None)
        self._last: tuple[Any, Any] | None = None
        if self._manager is None:
            return
        self._original = self._manager.run_fullgraph

        def kept(*args: Any, **kwargs: Any) -> Any:
            self._last = args, kwargs
            return self._original(*args, **kwargs)

        self._manager.run_fullgraph = kept

    @property
    def ready(self) -> bool:
        """Whether there is a full graph that can be replayed."""
        return self._last is not None

    def burst(self) -> list[float]:
        """Seconds of a replay, from bursts of them; nothing without a full graph.

        A replay computes the same step once more. Only receipts count it again.
        """
        if self._last is None:
            return []
        import torch

        args, kwargs = self._last
        torch.cuda.synchronize()
        seconds = []
        for _ in range(_BURSTS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._original(*args, **kwargs)
            start.record()
            for _ in range(_REPLAYS):
                self._original(*args, **kwargs)
            end.record()
            torch.cuda.synchronize()
            seconds.append(1e-3 * start.elapsed_time(end) / _REPLAYS)
        return seconds

    def again(self, times: int) -> None:
        """Replay, without waiting; nothing without a full graph."""
        if self._last is not None:
            args, kwargs = self._last
            for _ in range(times):
                self._original(*args, **kwargs)

    def close(self) -> None:
        """Leave the engine as it was."""
        if self._manager is not None:
            del self._manager.run_fullgraph
