"""Two ranks answer as one does, and hold the same receipts, conditions and scores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle as judge
from tests.engine import Ask, Engine, prompt, write
from tests.oracle import Intervention, Oracle

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
DOT = {"read": "dot", "name": "p", "weight": "v1", "layers": [1]}
DOT["submodule"] = "residual.post"


def _gated(gate: str) -> dict[str, Any]:
    return {
        "reads": [DOT],
        "writes": [{**write("v2", [2]), "scale": 3.0, "gate": gate}],
    }


ASKS = [
    Ask(prompt(9, 1), None, max_tokens=12),
    Ask(prompt(12, 2), {"writes": [write("v0", "all")]}, max_tokens=12),
    Ask(prompt(7, 3), {"writes": [{**write("v3", [2]), "write": "ablate"}]}, 12),
    Ask(prompt(20, 4), _gated("p >= 0"), max_tokens=12),
    Ask(prompt(20, 5), _gated("p.mean >= -15"), max_tokens=12),
    Ask(prompt(20, 6), _gated("latch(p >= 80)"), max_tokens=12),
]


@pytest.fixture(scope="module")
def two_ranks(
    models: Any, vectors: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `tests.two_ranks` printed."""
    given = tmp_path_factory.mktemp("ranks") / "asks.json"
    asks = [
        {"prompt": list(a.prompt), "spec": a.spec, "max_tokens": a.max_tokens}
        for a in ASKS
    ]
    given.write_text(
        json.dumps(
            {
                "model": str(models["llama"]),
                "vectors": str(vectors.folder),
                "asks": asks,
            }
        )
    )
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    command = [sys.executable, "-m", "tests.two_ranks", str(given)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
