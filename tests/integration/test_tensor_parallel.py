"""Two ranks answer as one does, and hold the same receipts, conditions and scores."""

import os
from typing import Any

import pytest
import torch

from tests import oracle as judge
from tests.engine import ENGINE_OPTIONS, Engine
from tests.oracle import Intervention, Oracle
from tests.two_ranks import ASKS, asked

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def two_ranks(
    models: Any, vectors: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `tests.two_ranks` answered."""
    file = tmp_path_factory.mktemp("ranks") / "asks.json"
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    options = {**ENGINE_OPTIONS, "tensor_parallel_size": 2}
    return asked(file, models["llama"], vectors.folder, options, env)


def test_both_ranks_hold_the_same(two_ranks: dict[str, Any]):
    first, second = two_ranks["ranks"]
    assert first == second
    assert any(any(map(any, slot)) for slot in first["counts"])


def test_they_answer_as_one_rank(two_ranks: dict[str, Any], llama: Engine):
    """The sums of two halves differ from one sum by roundings."""
    ones = llama.ask(*ASKS)
    for ask, one, two in zip(ASKS, ones, two_ranks["answers"], strict=True):
        assert two["tokens"] == list(one.tokens)
        rows = one.logprobs[-len(one.tokens) :]
        chosen = rows.gather(1, torch.tensor(one.tokens)[:, None])[:, 0].tolist()
        assert two["logprobs"] == pytest.approx(chosen, abs=1e-4)
        if ask.spec is None:
            assert two["eyesplice"] is None
            continue
        mine, theirs = one.eyesplice, two["eyesplice"]
        assert mine["writes"] == theirs["writes"]
        assert mine.get("gates") == theirs.get("gates")
        for name, score in mine.get("scores", {}).items():
            other = theirs["scores"][name]
            assert other["positions"] == score["positions"]
            assert other["values"] == pytest.approx(score["values"], abs=1e-3)


def test_gates_were_open_on_some_tokens_and_shut_on_others(two_ranks: dict[str, Any]):
    for answer in two_ranks["answers"][3:]:
        (gate,) = answer["eyesplice"]["gates"].values()
        assert 0 < gate["passed"] < gate["evaluated"] == 20 + 12 - 1


def test_a_vector_does_what_hooks_do(
    two_ranks: dict[str, Any], vectors: Any, llama_oracle: Oracle
):
    ask, answer = ASKS[1], two_ranks["answers"][1]
    ids = [*ask.prompt, *answer["tokens"]]
    edits = [
        Intervention("residual.post", layer, judge.add(vectors["v0"]))
        for layer in range(len(llama_oracle.layers))
    ]
    expected = llama_oracle.logprobs(ids[:-1], len(ask.prompt), edits)
    rows = expected[len(ask.prompt) - 1 :]
    chosen = rows.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0].tolist()
    assert answer["logprobs"] == pytest.approx(chosen, abs=1e-4)
