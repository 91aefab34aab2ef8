"""Device memory of the tables: what the default configuration takes, and of what."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.integration.buffers import Buffers
from tests.deployment_world import build, vllm_config

MIB = 2**20


def served(layers, hidden, vocabulary, dtype=torch.bfloat16, config=None):
    """The deployment and the tables of a server with vLLM's limits on an H200."""
    text = SimpleNamespace(num_hidden_layers=layers, num_attention_heads=32)
    model = {
        "dtype": dtype,
        "hf_text_config": text,
        "get_hidden_size": lambda: hidden,
        "get_head_size": lambda: hidden // 32,
        "get_vocab_size": lambda: vocabulary,
    }
    engine = vllm_config(**model)
    engine.scheduler_config = SimpleNamespace(
        max_num_seqs=256, max_num_batched_tokens=8192
    )
    deployment = build(config or {}, **model)
    plan = SplicePlan("layers", layers, deployment.wanted)
    sizes = deployment.buffer_sizes(engine)
    tables = Buffers.allocate(plan, sizes, dtype=dtype, device=torch.device("meta"))
    return deployment, tables


def test_an_8b_model_takes_less_than_32_mib_the_bank_included():
    _, tables = served(32, 4096, 128256)
    assert tables.program.shape[0] == 2 * 32 + 1
    by_hand = {
        "program": 65 * 257 * 9 * 64,
        "bank": 1024 * 4096 * 2,
        "capture": 1024 * 4096 * 2,
        "score": 8192 * 32 * 4,
        "counts": 257 * 2 * 256 * 4,
        "carry": 257 * 32 * 4 * 8,
        "token_sets": 32 * 4008 * 4,
        "clauses": 257 * 32 * 16,
    }
    for name, size in by_hand.items():
        assert getattr(tables, name).nbytes == size, name
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for value in (getattr(tables, field.name) for field in fields(tables))
        if isinstance(value, torch.Tensor)
    }
    total = tables.num_bytes()
    assert sum(by_hand.values()) < total < 32 * MIB
    assert total == sum(storages.values())


@pytest.mark.parametrize(
    ("layers", "hidden", "dtype", "rows"),
    [
        (32, 4096, torch.bfloat16, 1024),
        (28, 1536, torch.bfloat16, 2730),
        (30, 576, torch.bfloat16, 4096),
        (80, 8192, torch.bfloat16, 512),
        (126, 16384, torch.bfloat16, 504),
    ],
)
def test_the_capture_buffer_is_8_mib_within_bounds(layers, hidden, dtype, rows):
    deployment, tables = served(layers, hidden, 1000, dtype)
    assert deployment.capture_rows == tables.capture.shape[0] == rows


def test_a_configured_capture_buffer_is_as_configured():
    deployment, tables = served(32, 4096, 1000, config={"capture_rows": 77})
    assert deployment.capture_rows == tables.capture.shape[0] == 77
