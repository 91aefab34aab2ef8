"""Engines on a GPU: vanilla, spliced cold and spliced warm, for each model runner.

    EYESPLICE_GPU_MODEL=folder python -m pytest tests/gpu

The model is a folder with weights and a `config.json`; the vectors are made here. Every
engine is a process of its own (`benchmarks/engines.py`); its log and a record of what
was measured go to EYESPLICE_GPU_OUT. EYESPLICE_GPU_RUNNER is one of v1 and v2, to test it
alone.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyesplice.benchmarks.engines import EngineProcess

MODEL = os.environ.get("EYESPLICE_GPU_MODEL", "")
RUNNERS = {"v1": "0", "v2": "1"}
if only := os.environ.get("EYESPLICE_GPU_RUNNER"):
    RUNNERS = {only: RUNNERS[only]}

# On V2 the flag is given as well: its pass refuses to lower an op with a copy.
PASS_FLAG = {
    "inductor_passes": {"post_grad_custom_post_pass": "eyesplice.splice_pass"},
}

ENGINE: dict[str, Any] = {
    "model": MODEL,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    # A fixed cache instead of memory profiling: engines start side by side.
    "kv_cache_memory_bytes": 4 << 30,
    "gpu_memory_utilization": 0.1,
    "seed": 0,
}

NEED_NO_MODEL = ("test_two_ranks.py",)
if not (torch.cuda.is_available() and MODEL):
    here = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [file.name for file in here if file.name not in NEED_NO_MODEL]


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where logs and the record go."""
    named = os.environ.get("EYESPLICE_GPU_OUT")
    folder = Path(named) if named else tmp_path_factory.mktemp("out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def record(out: Path) -> Iterator[dict[str, Any]]:
    """What was measured, written to `acceptance.json` at the end."""
    values: dict[str, Any] = {}
    yield values
    (out / "acceptance.json").write_text(json.dumps(values, indent=1, sort_keys=True))


@pytest.fixture(scope="session")
def hidden() -> int:
    """Width of the model's residual stream."""
    config = json.loads((Path(MODEL) / "config.json").read_text())
    return int(config["hidden_size"])


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory, hidden: int) -> Path:
    """A folder of four random vectors, a..d."""
    folder = tmp_path_factory.mktemp("vectors")
    generator = torch.Generator().manual_seed(7)
    for name in "abcd":
        vector = torch.randn(hidden, generator=generator)
        save_file({name: vector}, folder / f"{name}.safetensors")
    return folder


class Engines:
    """The engines of one runner; vanilla and cold start at once, warm after cold."""

    def __init__(self, runner: str, vectors: Path, out: Path, cache: Path) -> None:
        self.runner = runner
        self._vectors, self._out, self._cache = vectors, out, cache
        self._engines = {kind: self._start(kind) for kind in ("vanilla", "cold")}

    def _start(self, kind: str) -> EngineProcess:
        spliced = kind != "vanilla"
        config = {"vectors": str(self._vectors), "ops": "all"}
        switch = {"eyesplice": config} if spliced else {}
        return EngineProcess(
            f"{self.runner}-{kind}",
            self._out / f"engine-{self.runner}-{kind}.log",
            plugin=spliced,
            env={
                "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[self.runner],
                # Vanilla has a cache of its own: it starts cold beside the cold one.
                "VLLM_CACHE_ROOT": str(self._cache / f"{self.runner}-{spliced}"),
            },
            **ENGINE,
            compilation_config=PASS_FLAG if spliced and self.runner == "v2" else {},
            enable_prefix_caching=True,
            additional_config=switch,
        )

    def get(self, kind: str) -> EngineProcess:
        """The engine "vanilla", "cold" or "warm" (the cold one's compile cache)."""
        if kind == "warm" and kind not in self._engines:
            self.get("cold")
            self._engines[kind] = self._start(kind)
        engine = self._engines[kind]
        return engine if engine.ready else engine.wait()

    def close(self) -> dict[str, Any]:
        """Stop them all; what each said of itself."""
        for engine in self._engines.values():
            engine.close()
        return {kind: engine.ready for kind, engine in self._engines.items()}


@pytest.fixture(scope="session")
def all_engines(
    vectors: Path,
    out: Path,
    record: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Engines]]:
    """The engines of every runner, started side by side."""
    cache = tmp_path_factory.mktemp("cache")
    made = {runner: Engines(runner, vectors, out, cache) for runner in RUNNERS}
    yield made
    for runner, engines in made.items():
        record[runner] = record.get(runner, {}) | engines.close()


@pytest.fixture(scope="module", params=list(RUNNERS))
def engines(request: pytest.FixtureRequest, all_engines: dict[str, Engines]) -> Engines:
    """The engines of one runner."""
    return all_engines[request.param]
