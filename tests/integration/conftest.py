"""Models, vectors, the judge and the engines that several files share."""

import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

# Read by vLLM when it is first imported: the engine runs in this process, and leaves
# compiled graphs and site tables in a folder of its own.
_cache = tempfile.TemporaryDirectory(prefix="eyesplice-tests-")
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CACHE_ROOT=_cache.name,
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.pop("EYESPLICE_CONFIG", None)
# The real model stays from one run to the next, until `make clean`.
os.environ.setdefault(
    "EYESPLICE_CACHE", str(Path(__file__).resolve().parents[2] / ".cache")
)
# Thousands of records a start, which pytest would keep for its report.
logging.getLogger("torch.__trace").propagate = False

from tests import tiny_models  # noqa: E402
from tests.engine import Engine, engine  # noqa: E402
from tests.oracle import Oracle  # noqa: E402


@dataclass(frozen=True)
class Vectors:
    """The registered vectors: a folder for the engine, tensors for the oracle."""

    folder: Path
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    """Eight `[hidden]` vectors v0..v7, a `[layers, hidden]` one and a narrow one."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"v{number}": torch.randn(tiny_models.HIDDEN_SIZE, generator=generator)
        for number in range(8)
    }
    rows = (tiny_models.NUM_LAYERS, tiny_models.HIDDEN_SIZE)
    tensors["layered"] = torch.randn(rows, generator=generator)
    tensors["experts"] = torch.tensor([2.0, -1.0, 0.5, -2.0])
    folder = tmp_path_factory.mktemp("vectors")
    for name, tensor in tensors.items():
        save_file({"vector": tensor}, folder / f"{name}.safetensors")
    return Vectors(folder, tensors)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> "Models":
    """Folders of tiny models, made when asked for."""
    return Models(tmp_path_factory.mktemp("models"))


class Models:
    """Folders of tiny models by name."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Path:
        folder = self._root / name
        return folder if folder.exists() else tiny_models.make(name, folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, downloaded unless the cache has it."""
    from eyesplice.integration.model_fetch import fetch_smollm2

    return fetch_smollm2()


@pytest.fixture(scope="session", autouse=True)
def _process_groups() -> Iterator[None]:
    """Engines of one process share its process groups; the last one is gone here."""
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@pytest.fixture(scope="package")
def llama_oracle(models: Models) -> Oracle:
    return Oracle(models["llama"])


@pytest.fixture(scope="package")
def llama(models: Models, vectors: Vectors) -> Iterator[Engine]:
    """The spliced Llama that most files ask: default sites, prefix caching on."""
    config = {"vectors": str(vectors.folder)}
    with engine(models["llama"], config, enable_prefix_caching=True) as running:
        yield running


@pytest.fixture(scope="package")
def vanilla(models: Models) -> Iterator[Engine]:
    """The same Llama in an engine that has never heard of eyesplice."""
    with engine(models["llama"], enable_prefix_caching=True) as running:
        yield running
