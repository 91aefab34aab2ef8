"""On a GPU, in bf16, with CUDA graphs and both runners: idle is vanilla, active is right.

bf16 kernels choose their shapes by the batch, so one request alone and in a batch differ
by rounding in vanilla vLLM too. Deviations are therefore held against vanilla's own.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.conftest import MODEL, Engines
from tests.oracle import Intervention, Oracle, ablate, add

Programs = list[dict[str, Any] | None]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 20000) for _ in range(length)] for _ in range(count)]


def writes(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"eyesplice": {"writes": list(entries)}}


MIXED: Programs = [
    writes({"vector": "a", "layers": [5], "scale": 0.5}),
    writes({"vector": "b", "layers": [10], "scale": 1.0, "when": "generated"}),
    writes({"vector": "c", "layers": "all", "submodule": "mlp.post", "scale": 0.05}),
    writes({"write": "ablate", "vector": "a", "layers": "all"}),
    writes({"vector": "d", "layers": [3], "submodule": "attention.pre", "scale": 0.2}),
    writes({"vector": "a", "layers": [12], "scale": 2.0, "when": "prompt"}),
    writes(
        {"vector": "b", "layers": [7], "submodule": "residual.mid", "scale": 0.7},
        {"vector": "c", "layers": [8], "submodule": "attention.post", "scale": -0.4},
    ),
    writes({"vector": "d", "layers": [2], "scale": 1.5, "when": "positions(0:4)"}),
]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MODEL)


def test_cuda_graphs_and_splice(engines: Engines, oracle: Oracle) -> None:
    vanilla, cold = engines.get("vanilla").ready, engines.get("cold").ready
    for ready in (vanilla, cold):
        assert ready["cudagraph_mode"].endswith("FULL_AND_PIECEWISE")
        v2 = ready["runner"] == "vllm.v1.worker.gpu.model_runner"
        assert v2 == (engines.runner == "v2")
    assert vanilla["boundary_ops"] == 0
    layers = len(oracle.layers)
    assert cold["boundary_ops"] == 2 * layers + 1
    assert cold["inline_ops"] == cold["missing_sites"] == 0
    assert cold["pass_ran"]


def test_idle_equals_vanilla(engines: Engines, record: dict[str, Any]) -> None:
    batch, idle = prompts(64, 40, seed=1), [None] * 64
    expected = engines.get("vanilla").generate(batch, 64, idle)["tokens"]
    answered = engines.get("cold").generate(batch, 64, idle)["tokens"]
    equal = sum(a == b for a, b in zip(expected, answered, strict=True))
    record.setdefault(engines.runner, {})["idle_equal_of_64"] = equal
    assert equal == 64


def deviation(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Per request, the largest logprob difference while the tokens agree."""
    result = []
    for a, b, x, y in zip(
        one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True
    ):
        largest = 0.0
        for s, t, p, q in zip(a, b, x, y, strict=True):
            largest = max(largest, abs(p - q))
            if s != t:
                break
        result.append(largest)
    return result


def alone(engine: Any, batch: list[list[int]], programs: Programs) -> dict[str, Any]:
    each = [
        engine.generate([prompt], 24, [program], logprobs=1)
        for prompt, program in zip(batch, programs, strict=True)
    ]
    return {key: [one[key][0] for one in each] for key in ("tokens", "logprobs")}


def test_mixed_batch(engines: Engines, record: dict[str, Any]) -> None:
    batch = prompts(16, 40, seed=2)
    programs: Programs = [*MIXED, *([None] * 8)]
    order = list(range(16))
    random.Random(3).shuffle(order)
    programs = [programs[i] for i in order]
    vanilla, cold = engines.get("vanilla"), engines.get("cold")
    idle: Programs = [None] * 16
    together_idle = vanilla.generate(batch, 24, idle, logprobs=1)
    noise = max(deviation(together_idle, alone(vanilla, batch, idle)))
    together = cold.generate(batch, 24, programs, logprobs=1)
    worst = max(deviation(together, alone(cold, batch, programs)))
    plain = [i for i, program in enumerate(programs) if program is None]
    plain_equal = [together["tokens"][i] == together_idle["tokens"][i] for i in plain]
    changed = [
        together["tokens"][i] != together_idle["tokens"][i]
        for i, program in enumerate(programs)
        if program is not None
    ]
    record.setdefault(engines.runner, {})["mixed_batch"] = {
        "batch_vs_alone": worst,
        "vanilla_batch_vs_alone": noise,
        "plain_equal_of_8": sum(plain_equal),
        "steered_changed_of_8": sum(changed),
    }
    assert all(plain_equal)
    assert sum(changed) >= 6
    assert worst <= max(2 * noise, 0.05)


def test_warm_start_steers_alike(engines: Engines, record: dict[str, Any]) -> None:
    batch = prompts(8, 40, seed=4)
    cold = engines.get("cold").generate(batch, 24, MIXED)["tokens"]
    warm_engine = engines.get("warm")
    warm = warm_engine.generate(batch, 24, MIXED)["tokens"]
    record.setdefault(engines.runner, {})["warm_equal_of_8"] = sum(
        a == b for a, b in zip(cold, warm, strict=True)
    )
    assert warm == cold
    assert not warm_engine.ready["pass_ran"], "the compile cache was not used"
    assert (
        warm_engine.ready["boundary_ops"] == engines.get("cold").ready["boundary_ops"]
    )


def test_prefix_cache_is_not_poisoned(engines: Engines) -> None:
    prompt = prompts(1, 200, seed=5)
    strong: Programs = [writes({"vector": "a", "layers": [5], "scale": 3.0})]
    cold, plain = engines.get("cold"), list[dict[str, Any] | None]([None])
    expected = engines.get("vanilla").generate(prompt, 24, plain)["tokens"]
    first = cold.generate(prompt, 24, strong)["tokens"]
    assert cold.generate(prompt, 24, plain)["tokens"] == expected
    assert cold.generate(prompt, 24, strong)["tokens"] == first
    assert first != expected


def test_many_programs_reuse_rows(engines: Engines) -> None:
    batch = prompts(200, 12, seed=6)
    programs: Programs = [
        writes({"vector": "abcd"[i % 4], "layers": [i % 20], "scale": 0.01 * i})
        for i in range(200)
    ]
    cold = engines.get("cold")
    together = cold.generate(batch, 12, programs, logprobs=1)
    picked = list(range(0, 200, 23))
    single = alone(cold, [batch[i] for i in picked], [programs[i] for i in picked])
    cut = {key: [row[:12] for row in rows] for key, rows in single.items()}
    subset = {key: [rows[i] for i in picked] for key, rows in together.items()}
    assert max(deviation(subset, cut)) <= 0.25


def test_chunked_prefill(engines: Engines, record: dict[str, Any]) -> None:
    """A prompt that is cut, beside other requests, steers as it does in one piece."""
    program = writes({"vector": "a", "layers": [10], "scale": 0.5})
    vanilla, cold = engines.get("vanilla"), engines.get("cold")

    def cut_and_whole(engine: Any, last: dict[str, Any] | None, seed: int) -> float:
        # 20 x 200 + 1900 prompt tokens in steps of 2048; prompts that no engine has
        # seen, so that the first run finds nothing in the prefix cache.
        long, short = prompts(1, 1900, seed=seed), prompts(20, 200, seed=seed + 1)
        batch, programs = [*short, *long], [*([None] * 20), last]
        together = engine.generate(batch, 8, programs, logprobs=1)
        whole = engine.generate(long, 8, [last], logprobs=1)
        return max(deviation({k: v[-1:] for k, v in together.items()}, whole))

    noise = cut_and_whole(vanilla, None, 9)
    steered = cut_and_whole(cold, program, 11)
    record.setdefault(engines.runner, {})["chunked"] = [steered, noise]
    assert steered <= max(2 * noise, 0.3)


@pytest.mark.parametrize("kernel", ["plain", "steering_vector", "ablate"])
def test_against_hooks(
    engines: Engines,
    oracle: Oracle,
    vectors: Path,
    record: dict[str, Any],
    kernel: str,
) -> None:
    """bf16 engine against fp32 hooks: as far from them as vanilla is, and no further."""
    prompt = prompts(1, 40, seed=8)[0]
    vector = load_file(vectors / "a.safetensors")["a"].bfloat16().float()
    layers = len(oracle.layers)
    if kernel == "plain":
        program, interventions = None, []
    elif kernel == "ablate":
        program = writes({"write": "ablate", "vector": "a", "layers": "all"})
        interventions = [
            Intervention("residual.post", layer, ablate(vector, 1.0))
            for layer in range(layers)
        ]
    else:
        program = writes({"vector": "a", "layers": [10], "scale": 0.5})
        interventions = [Intervention("residual.post", 10, add(vector, 0.5))]
    answer = engines.get("cold").generate([prompt], 24, [program], logprobs=1)
    tokens = answer["tokens"][0]
    expected = oracle.logprobs([*prompt, *tokens], len(prompt), interventions)
    at = torch.arange(len(tokens)) + len(prompt) - 1
    chosen = expected[at, torch.tensor(tokens)]
    difference = (torch.tensor(answer["logprobs"][0]) - chosen).abs().mean().item()
    record.setdefault(engines.runner, {})[f"hooks_{kernel}"] = difference
    assert difference <= 0.08
    if kernel == "plain":
        plain = engines.get("vanilla").generate([prompt], 24, [None], logprobs=1)
        assert plain == answer
