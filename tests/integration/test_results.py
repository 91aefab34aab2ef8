"""What the ops find out reaches the client: scores, captures, receipts, in every way."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eyesplice.integration import answers as registry
from tests import oracle as judge
from tests.engine import Answer, Ask, Engine, assert_judged, engine, prompt
from tests.oracle import Intervention, Oracle
from tests.tiny_models import HIDDEN_SIZE

pytestmark = pytest.mark.engine

LAYERS = (1, 2)
BIAS = 0.25
TIGHT = {"max_model_len": 128, "num_gpu_blocks_override": 9, "max_num_seqs": 8}


def asking(number: int, **more: Any) -> dict[str, Any]:
    """Reads of two kinds, and a write behind one of them."""
    return {
        "reads": [
            {
                "read": "probe",
                "name": "p",
                "weight": f"v{number}",
                "bias": BIAS,
                "layers": list(LAYERS),
                "submodule": "residual.post",
            },
            {"read": "capture", "layers": [1], "submodule": "residual.mid"},
            {
                "read": "capture",
                "layers": [0],
                "submodule": "residual.post",
                "when": "last_token",
            },
        ],
        "writes": [
            {
                "vector": "v7",
                "layers": [0, 3],
                "submodule": "attention.post",
                "scale": 0.5,
                "when": "generated",
            }
        ],
        **more,
    }


def ask(number: int, length: int, max_tokens: int = 6, **more: Any) -> Ask:
    spec = asking(number, **more)
    return Ask(prompt(length, 200 + number), spec, max_tokens, prompt_logprobs=False)


ASKS = [ask(0, 9), ask(1, 70, 5), ask(2, 33, 12)]
PLAIN = Ask(prompt(12, 300), max_tokens=8)


@pytest.fixture(scope="module")
def reading(models, vectors) -> Iterator[Engine]:
    with engine(models["llama"], {"vectors": str(vectors.folder)}) as running:
        yield running


def hooks(
    oracle: Oracle, vectors: Any, answer: Answer
) -> dict[tuple[str, int], Tensor]:
    """The same values by hooks, under the same write: `[tokens, hidden]` by site."""
    wanted = [("residual.post", 0), ("residual.mid", 1)]
    wanted += [("residual.post", layer) for layer in LAYERS]
    found: dict[tuple[str, int], list[Tensor]] = {site: [] for site in wanted}
    push = judge.where(judge.add(vectors["v7"], 0.5), judge.generated)
    edits = [Intervention("attention.post", layer, push) for layer in (0, 3)]
    edits += [Intervention(*site, judge.record(into)) for site, into in found.items()]
    assert_judged(oracle, answer, *edits)
    return {site: into[0] for site, into in found.items()}


def rows_of(capture: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(capture["data"]))
    return torch.frombuffer(data, dtype=torch.float32).reshape(capture["shape"])


def assert_found(
    oracle: Oracle, vectors: Any, answers: Sequence[Answer], asks: Sequence[Ask]
) -> None:
    for number, (answer, asked) in enumerate(zip(answers, asks, strict=True)):
        found, values = answer.eyesplice, hooks(oracle, vectors, answer)
        length, tokens = len(asked.prompt), len(asked.prompt) + asked.max_tokens - 1
        assert "error" not in found, found
        weight = vectors[f"v{number}"]
        for score, layer in zip(found["scores"]["p"], LAYERS, strict=True):
            assert score["layer"] == layer
            assert score["positions"] == list(range(tokens))
            expected = values["residual.post", layer] @ weight + BIAS
            worst = (torch.tensor(score["values"]) - expected).abs().max()
            assert worst < 1e-4 * expected.abs().max(), worst
        captures = found["captures"]
        mid = captures["blocks.1.hook_resid_mid"]
        assert mid["dtype"] == "float32" and mid["positions"] == list(range(tokens))
        expected = values["residual.mid", 1]
        torch.testing.assert_close(rows_of(mid), expected, atol=1e-4, rtol=1e-4)
        last = captures["blocks.0.hook_resid_post"]
        assert last["positions"] == [length - 1]
        assert last["shape"] == [1, HIDDEN_SIZE]
        expected = values["residual.post", 0][length - 1 : length]
        torch.testing.assert_close(rows_of(last), expected, atol=1e-4, rtol=1e-4)
        (write,) = found["writes"]
        assert write["layers"] == [0, 3] and write["tokens"] == asked.max_tokens - 1


def test_answers_are_what_hooks_find(reading: Engine, llama_oracle, vectors):
    assert_found(llama_oracle, vectors, reading.alone(*ASKS), ASKS)


def test_a_mixed_batch_keeps_its_requests_apart(reading, llama_oracle, vectors):
    plain, *answers = reading.ask(PLAIN, *ASKS)
    assert plain.eyesplice is None
    assert_found(llama_oracle, vectors, answers, ASKS)


def test_chunks_and_small_capture_buffers_change_nothing(models, llama_oracle, vectors):
    config = {"vectors": str(vectors.folder), "capture_rows": 128}
    with engine(models["llama"], config, max_num_batched_tokens=24) as chunked:
        answers = chunked.ask(*ASKS)
    assert_found(llama_oracle, vectors, answers, ASKS)


def test_preempted_requests_answer_as_if_alone(models, llama_oracle, vectors):
    asks = [ask(number, 28 + number, 50) for number in range(5)]
    config = {"vectors": str(vectors.folder)}
    with engine(models["llama"], config, **TIGHT) as tight:
        lost, scheduler = [], tight.scheduler
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *args, **kwargs: (
            lost.append(request.request_id),
            preempt(request, *args, **kwargs),
        )[1]
        answers = tight.ask(*asks)
        del scheduler._preempt_request
    assert len(set(lost)) >= 2
    assert_found(llama_oracle, vectors, answers, asks)


def test_rows_without_room_are_counted_in_the_answer(models, vectors):
    config = {"vectors": str(vectors.folder), "capture_rows": 16}
    with engine(models["llama"], config) as small:
        (answer,) = small.ask(ASKS[2])
    mid = answer.eyesplice["captures"]["blocks.1.hook_resid_mid"]
    kept = mid["shape"][0]
    assert kept == len(mid["positions"]) < 33 + 11
    missing = 33 + 11 + 1 - kept
    missing -= answer.eyesplice["captures"]["blocks.0.hook_resid_post"]["shape"][0]
    assert f"{missing} captured rows found no room" in answer.eyesplice["error"]


def _params(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=6, detokenize=False, extra_args={"eyesplice": asking(0)}, **more
    )


def test_every_sample_of_a_request_has_its_own_answer(reading: Engine):
    given = [{"prompt_token_ids": prompt(9, 200)}]
    params = _params(n=3, temperature=1.0, seed=7)
    (output,) = reading.llm.generate(given, params, use_tqdm=False)
    found = [part.eyesplice for part in output.outputs]
    assert output.eyesplice is found[0]
    assert [one["writes"][0]["tokens"] for one in found] == [5, 5, 5]
    generated = {tuple(part.token_ids) for part in output.outputs}
    scores = {tuple(one["scores"]["p"][0]["values"]) for one in found}
    assert len(scores) == len(generated) > 1
    assert registry.owed() == 0


def _stream(running: Engine, params: Any) -> Iterator[Any]:
    core = running.llm.llm_engine
    core.add_request("streamed", {"prompt_token_ids": prompt(9, 200)}, params)
    while core.has_unfinished_requests():
        yield from core.step()


def test_scores_come_with_each_output_when_asked_for(reading: Engine):
    from vllm.sampling_params import RequestOutputKind

    params = _params(output_kind=RequestOutputKind.DELTA, temperature=0)
    params.extra_args["eyesplice"] = asking(0, stream_scores=True)
    found = [output.eyesplice for output in _stream(reading, params)]
    assert len(found) == 6
    given = [one["scores"]["p"][1]["positions"] for one in found]
    assert given == [list(range(9)), *([p] for p in range(9, 14))]
    (whole,) = reading.ask(ASKS[0])
    values = [v for one in found for v in one["scores"]["p"][1]["values"]]
    expected = whole.eyesplice["scores"]["p"][1]["values"]
    assert values == pytest.approx(expected, abs=1e-4)
    assert found[-1]["writes"] == whole.eyesplice["writes"]
    assert all("writes" not in one for one in found[:-1])


def test_an_aborted_request_leaves_nothing_behind(reading: Engine):
    core = reading.llm.llm_engine
    given = {"prompt_token_ids": prompt(9, 200)}
    core.add_request("gone", given, _params(temperature=0))
    core.step()
    core.step()
    core.abort_request(["gone"])
    (answer,) = reading.ask(ASKS[0])
    assert answer.eyesplice["writes"][0]["tokens"] == 5
    assert registry.owed() == 0 and reading.router.active_requests <= 1
    assert reading.scheduler._eyesplice_answers.is_empty
