"""Two GPUs answer as one does, and hold the same receipts, conditions and scores.

A tiny random model in fp32, compiled and with CUDA graphs; it needs two devices and no
EYESPLICE_GPU_MODEL.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import oracle as judge
from tests import tiny_models
from tests.oracle import Intervention, Oracle
from tests.two_ranks import ASKS, asked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_logprobs": -1,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.1,
    "enable_prefix_caching": False,
    "seed": 0,
}
NEAR = 1e-2
"""Attention multiplies in TF32 and sums come in another order."""


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        f"v{i}": torch.randn(tiny_models.HIDDEN_SIZE, generator=generator)
        for i in range(4)
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(
    model: Path, vectors: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What an engine on one device says, and one on two; both started at once."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, vector in vectors.items():
        save_file({name: vector}, folder / f"{name}.safetensors")

    def run(size: int) -> dict[str, Any]:
        env = os.environ | {"VLLM_CACHE_ROOT": str(folder / f"cache-{size}")}
        options = OPTIONS | {"tensor_parallel_size": size}
        return asked(folder / f"{size}.json", model, folder, options, env)

    with ThreadPoolExecutor() as pool:
        found = dict(zip((1, 2), pool.map(run, (1, 2)), strict=True))
    if out := os.environ.get("EYESPLICE_GPU_OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        Path(out, "two-ranks.json").write_text(json.dumps(found))
    return found


def test_both_ranks_hold_the_same(ranks: dict[int, Any]):
    first, second = ranks[2]["ranks"]
    assert first == second
    assert any(any(map(any, slot)) for slot in first["counts"])


def test_two_devices_answer_as_one(ranks: dict[int, Any]):
    for ask, one, two in zip(
        ASKS, ranks[1]["answers"], ranks[2]["answers"], strict=True
    ):
        assert two["tokens"] == one["tokens"]
        assert two["logprobs"] == pytest.approx(one["logprobs"], abs=NEAR)
        if ask.spec is None:
            assert two["eyesplice"] is None
            continue
        mine, theirs = one["eyesplice"], two["eyesplice"]
        assert mine["writes"] == theirs["writes"]
        assert mine.get("gates") == theirs.get("gates")
        for name, score in mine.get("scores", {}).items():
            values = theirs["scores"][name]["values"]
            assert values == pytest.approx(score["values"], abs=10 * NEAR)


def test_gates_were_open_on_some_tokens_and_shut_on_others(ranks: dict[int, Any]):
    gates = [answer["eyesplice"]["gates"] for answer in ranks[2]["answers"][3:]]
    passed = [gate["passed"] for one in gates for gate in one.values()]
    assert all(0 <= count <= 20 + 12 - 1 for count in passed)
    assert any(0 < count < 20 + 12 - 1 for count in passed)


def test_a_vector_does_what_hooks_do(ranks: dict[int, Any], vectors: Any, model: Path):
    oracle = Oracle(model)
    ask, answer = ASKS[1], ranks[2]["answers"][1]
    ids = [*ask.prompt, *answer["tokens"]]
    edits = [
        Intervention("residual.post", layer, judge.add(vectors["v0"]))
        for layer in range(len(oracle.layers))
    ]
    rows = oracle.logprobs(ids[:-1], len(ask.prompt), edits)[len(ask.prompt) - 1 :]
    chosen = rows.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0].tolist()
    assert answer["logprobs"] == pytest.approx(chosen, abs=NEAR)
