"""vLLM's GPU worker with memory of its own or another engine's."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from eyesplice.benchmarks.shared_memory import Memory


class SharedWorker(Worker):  # type: ignore[misc]  # vLLM is not typed here
    """A worker that lends its weights and KV cache, or borrows them."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, and then lend or borrow."""
        self.shared_memory = Memory.of_environment(self.rank)
        with self.shared_memory.loading():
            super().load_model(*args, **kwargs)
        self.shared_memory.weights(self.model_runner.get_model())

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, or borrow it."""
        with self.shared_memory.cache():
            super().initialize_from_config(*args, **kwargs)
        self.shared_memory.note()
