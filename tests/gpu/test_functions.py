"""On a GPU, in bf16, with CUDA graphs and both runners: reads, gates and receipts.

A gate is held against the scores that the same answer reports, which are the fp32
numbers that the kernel compared: the set of tokens must be exactly theirs. The scores
are held against fp32 hooks, within what bf16 rounding does to the stream.
"""

import base64
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.conftest import Engines
from tests.gpu.test_engine import Programs, deviation, prompts
from tests.oracle import Intervention, Oracle, record

Answer = dict[str, Any]


def ask(
    engine: Any, batch: list[list[int]], programs: Programs, tokens: int = 24
) -> list[Answer]:
    """Tokens, logprobs and the eyesplice object of each request."""
    answer = engine.generate(batch, tokens, programs, logprobs=1)
    return [
        dict(zip(("tokens", "logprobs", "eyesplice"), one, strict=True))
        for one in zip(
            answer["tokens"], answer["logprobs"], answer["eyesplice"], strict=True
        )
    ]


def spec(*functions: dict[str, Any]) -> dict[str, Any]:
    reads = [f for f in functions if "read" in f]
    return {
        "eyesplice": {
            "reads": reads,
            "writes": [f for f in functions if "read" not in f],
        }
    }


def probe(name: str, layer: int, **more: Any) -> dict[str, Any]:
    return {"read": "probe", "name": name, "weight": "a", "layers": [layer],
            "submodule": "residual.post", **more}  # fmt: skip


def steer(gate: str | None = None, **more: Any) -> dict[str, Any]:
    entry = {"name": "w", "vector": "b", "layers": [14], "scale": 0.5, **more}
    return entry | ({"gate": gate} if gate else {})


@pytest.fixture(scope="module")
def threshold(engines: Engines) -> float:
    """The median score of plain prompts, so that a gate there is open half the time."""
    batch = prompts(8, 60, seed=21)
    answers = ask(engines.get("cold"), batch, [spec(probe("p", 9))] * 8, tokens=8)
    values = [v for a in answers for v in a["eyesplice"]["scores"]["p"]["values"]]
    return float(torch.tensor(values).median())


def test_reads_change_nothing(engines: Engines) -> None:
    batch = prompts(16, 40, seed=22)
    reads = spec(
        probe("p", 9),
        {"read": "norm", "layers": "all", "submodule": "residual.mid"},
        {"read": "capture", "layers": [3, 20], "when": "last_token"},
    )
    cold = engines.get("cold")
    plain = cold.generate(batch, 24, [None] * 16, logprobs=1)
    answered = ask(cold, batch, [reads] * 16)
    assert [a["tokens"] for a in answered] == plain["tokens"]
    assert [a["logprobs"] for a in answered] == plain["logprobs"]


def test_scores_and_captures_against_hooks(
    engines: Engines, vectors: Path, record_: dict[str, Any]
) -> None:
    from tests.gpu.conftest import MODEL

    oracle = Oracle(MODEL)
    prompt = prompts(1, 60, seed=23)[0]
    reads = spec(probe("p", 9), {"read": "capture", "layers": [9]})
    (answer,) = ask(engines.get("cold"), [prompt], [reads])
    found = answer["eyesplice"]
    rows: list[torch.Tensor] = []
    ids = [*prompt, *answer["tokens"]][:-1]
    oracle.logprobs(ids, len(prompt), [Intervention("residual.post", 9, record(rows))])
    weight = load_file(vectors / "a.safetensors")["a"].bfloat16().float()
    expected = rows[0] @ weight
    score = found["scores"]["p"]
    assert score["positions"] == list(range(len(ids)))
    values = torch.tensor(score["values"])
    error = ((values - expected).norm() / expected.norm()).item()
    capture = found["captures"]["blocks.9.hook_resid_post"]
    assert capture["positions"] == list(range(len(ids)))
    data = bytearray(base64.b64decode(capture["data"]))
    captured = torch.frombuffer(data, dtype=torch.bfloat16).view(capture["shape"])
    # The score is of the fp32 sum, the capture of its rounding.
    own = captured.float() @ weight
    record_.setdefault(engines.runner, {})["scores"] = {
        "relative_error_to_hooks": error,
        "relative_error_to_capture": ((own - values).norm() / own.norm()).item(),
    }
    assert error <= 0.03
    assert (own - values).norm() <= 0.01 * own.norm()


@pytest.fixture
def record_(record: dict[str, Any]) -> dict[str, Any]:
    """The session's record, under a name that the hook does not have."""
    return record


def fired(answer: Answer) -> list[int]:
    """Positions at which the read behind the same gate as the write was made."""
    found = answer["eyesplice"]
    positions: list[int] = found["scores"]["open"]["positions"]
    (receipt,) = found["writes"]
    assert receipt["tokens"] == len(positions) == found["gates"]["w"]["passed"]
    return positions


def gated(gate: str, **more: Any) -> dict[str, Any]:
    opened = {"read": "norm", "name": "open", "layers": [13], "gate": gate}
    return spec(probe("p", 9, **more), opened, steer(gate))


def test_gates_open_exactly_where_the_scores_say(
    engines: Engines, threshold: float, record_: dict[str, Any]
) -> None:
    batch = prompts(24, 50, seed=24)
    kinds = {
        "own": gated(f"p >= {threshold!r}"),
        "mean": gated(f"p.mean >= {threshold!r}", over="prompt"),
        "latch": gated(f"latch(p >= {threshold + 1.0!r})"),
    }
    programs = [list(kinds.values())[i % 3] for i in range(24)]
    answers = ask(engines.get("cold"), batch, programs)
    opened = dict.fromkeys(kinds, 0)
    for i, answer in enumerate(answers):
        kind = list(kinds)[i % 3]
        score = answer["eyesplice"]["scores"]["p"]
        values = torch.tensor(score["values"], dtype=torch.float64)
        assert score["positions"] == list(range(50 + 23))
        expected = values >= threshold
        if kind == "latch":
            expected = (values >= threshold + 1.0).cummax(0).values
        if kind == "mean":
            expected = torch.zeros(73, dtype=torch.bool)
            expected[49:] = bool(values[:50].mean() >= threshold)
        assert fired(answer) == expected.nonzero()[:, 0].tolist(), kind
        opened[kind] += int(expected.sum())
    record_.setdefault(engines.runner, {})["gates_opened"] = opened
    assert all(opened.values())


def test_twenty_repetitions_open_the_same_gates(
    engines: Engines, threshold: float
) -> None:
    batch = prompts(8, 50, seed=25)
    programs: Programs = [gated(f"p.mean >= {threshold!r}", over="prompt")] * 4
    programs += [gated(f"latch(p >= {threshold + 1.0!r})")] * 4
    first = ask(engines.get("cold"), batch, programs, tokens=8)
    for _ in range(19):
        again = ask(engines.get("cold"), batch, programs, tokens=8)
        assert [fired(a) for a in again] == [fired(a) for a in first]


def test_token_conditions_see_the_sampled_token(engines: Engines) -> None:
    batch = prompts(8, 30, seed=26)
    plain = engines.get("cold").generate(batch, 24, [None] * 8, logprobs=1)["tokens"]
    for i in (0, 3):
        # Ids that this very answer has: the write must fire on the step after each.
        wanted = sorted({plain[i][2], plain[i][9], batch[i][4]})
        text = f"token_in({', '.join(map(str, wanted))})"
        write = steer(scale=0.0, when=text)
        seen = {"read": "norm", "name": "open", "layers": [2], "when": text}
        programs: Programs = [spec(write, seen) if j == i else None for j in range(8)]
        answer = ask(engines.get("cold"), batch, programs)[i]
        ids = [*batch[i], *answer["tokens"]][:-1]
        expected = [p for p, token in enumerate(ids) if token in wanted]
        assert answer["eyesplice"]["scores"]["open"]["positions"] == expected
        assert answer["eyesplice"]["writes"][0]["tokens"] == len(expected)


def test_sixteen_different_programs_as_if_alone(
    engines: Engines, threshold: float, record_: dict[str, Any]
) -> None:
    batch = prompts(16, 40, seed=27)
    programs: Programs = [
        gated(f"p >= {threshold!r}"),
        gated(f"p.mean < {threshold!r}", over="request"),
        spec({"write": "replace", "vector": "c", "layers": [12], "scale": 0.1}),
        spec({"write": "mask", "vector": "d", "layers": [6], "scale": 0.05}),
        spec(steer(scale=1.0, preserve_norm=True)),
        spec({"write": "ablate", "vector": "a", "layers": "all"}),
        spec({"read": "capture", "layers": [4], "when": "generated"}),
        spec(steer(when="after(token_in(198, 30, 28))")),
        *([None] * 8),
    ]
    random.Random(4).shuffle(programs)
    cold = engines.get("cold")
    together = cold.generate(batch, 24, programs, logprobs=1)
    single = [
        cold.generate([p], 24, [s], logprobs=1)
        for p, s in zip(batch, programs, strict=True)
    ]
    alone = {k: [one[k][0] for one in single] for k in ("tokens", "logprobs")}
    worst = max(deviation(together, alone))
    record_.setdefault(engines.runner, {})["functions_batch_vs_alone"] = worst
    assert worst <= 0.05
    idle = engines.get("vanilla").generate(batch, 24, [None] * 16, logprobs=1)
    for i, program in enumerate(programs):
        if program is None:
            assert together["tokens"][i] == idle["tokens"][i]
