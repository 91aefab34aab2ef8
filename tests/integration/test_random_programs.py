"""Two thousand random programs, in mixed batches with cut prompts, against hooks."""

import base64
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import functions as f
from tests import oracle as judge
from tests.engine import Answer, Ask, Engine, assert_judged, engine
from tests.functions import Fn, Run
from tests.oracle import SUBMODULES, Intervention, Oracle
from tests.random_functions import LISTED, TENSORS
from tests.random_programs import HOOKS, Draft, Program, make
from tests.tiny_models import NUM_LAYERS

pytestmark = pytest.mark.engine

BATCH = 16
CHUNKS, CHUNK = 5, 400
MARGIN = 1e-3
"""A value nearer to a jump than this may fall on the other side of it."""

CLOSE = {"atol": 2e-4, "rtol": 2e-4}


@dataclass(frozen=True)
class World:
    oracle: Oracle
    running: Engine
    plain: Mapping[tuple[str, int], Tensor]


@pytest.fixture(scope="module")
def world(
    models: Any, llama_oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("random-vectors")
    _save(folder)
    config = {
        "vectors": str(folder),
        "ops": "all",
        "capture_rows": 2048,
        "max_entries": 32,
    }
    # Less than the prompts of a batch: some are cut, and come in with others' decoding.
    options = {"max_num_batched_tokens": 40, "max_model_len": 32}
    with engine(models["llama"], config, **options) as running:
        yield World(llama_oracle, running, _plain_values(llama_oracle))


def _save(folder: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({"tensor": tensor}, folder / f"{name}.safetensors")


def _prompt(number: int) -> list[int]:
    rng = random.Random(f"prompt {number}")
    return rng.choices(LISTED, k=rng.randint(4, 12))


def _plain_values(oracle: Oracle) -> dict[tuple[str, int], Tensor]:
    places = list(itertools.product(SUBMODULES, range(NUM_LAYERS)))
    kept: dict[tuple[str, int], list[Tensor]] = {place: [] for place in places}
    hooks = [Intervention(*place, judge.record(kept[place])) for place in places]
    for number in range(8):
        ids = _prompt(-1 - number)
        oracle.logprobs(ids, len(ids), hooks)
    return {place: torch.cat(found) for place, found in kept.items()}


def _asked(world: World, number: int) -> tuple[Program, Ask]:
    program = make(number, world.plain)
    return program, Ask(_prompt(number), program.spec, 2 + number % 2)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_do_what_hooks_do(world: World, chunk: int):
    numbers = itertools.count(100_000 * chunk)
    compared = cut = partly = 0
    while compared < CHUNK:
        batch = list(itertools.islice(numbers, BATCH))
        made = [_asked(world, number) for number in batch]
        with world.running.steps() as steps:
            answers = world.running.ask(*(ask for _, ask in made))
        cut += _cut_prompts(steps)
        for number, (program, _), answer in zip(batch, made, answers, strict=True):
            compared += _compared(world.oracle, number, program, answer)
            gates = answer.eyesplice["gates"].values()
            partly += sum(0 < g["passed"] < g["evaluated"] for g in gates)
    assert cut > CHUNK / 20
    assert partly > CHUNK / 10, "gates are always open, or never"


def _cut_prompts(steps: list[Any]) -> int:
    """Prompts that were not computed in one step."""
    return sum(
        step.num_scheduled_tokens[new.req_id] < len(new.prompt_token_ids)
        for step in steps
        for new in step.scheduled_new_reqs
    )


def _compared(oracle: Oracle, number: int, program: Program, answer: Answer) -> bool:
    """Whether the answer could be held against hooks; it must agree with them then."""
    program.ids = [*answer.prompt, *answer.tokens][:-1]
    functions = program.functions()
    run, hooks = f.interventions(functions, len(program.ids), len(answer.prompt))
    label = f"program {number}: {program.spec}"
    try:
        assert_judged(oracle, answer, *hooks, tolerance=2e-4, label=label)
        _check_answer(program, functions, run, answer.eyesplice)
    except AssertionError as error:
        if program.margins.least < MARGIN:
            return False
        raise AssertionError(label) from error
    return program.margins.least >= MARGIN


def _check_answer(
    program: Program, functions: list[Fn], run: Run, found: Mapping[str, Any]
) -> None:
    assert "error" not in found
    gates, writes, captures = {}, {}, {}
    for draft, function in zip(program.drafts, functions, strict=True):
        when, chosen = function.chosen(run)
        if draft.gate is not None:
            counts = {"passed": int(chosen.sum()), "evaluated": int(when.sum())}
            gates[draft.name] = counts
        if draft.edit is not None:
            writes[draft.name] = int(chosen.sum())
        elif draft.scored:
            for layer in draft.layers:
                _check_scores(found["scores"][draft.name], draft, layer, run)
        else:
            sites = {f"blocks.{n}.{HOOKS[draft.submodule]}": n for n in draft.layers}
            for site, layer in sites.items():
                captures.setdefault(site, []).append((draft.name, layer, chosen))
    assert found["gates"] == gates
    assert {one["function"]: one["tokens"] for one in found["writes"]} == writes
    assert found["captures"].keys() == captures.keys()
    for site, wanted in captures.items():
        _check_capture(found["captures"][site], wanted, run)


def _check_scores(reported: Any, draft: Draft, layer: int, run: Run) -> None:
    parts = reported if isinstance(reported, list) else [reported]
    (one,) = [part for part in parts if part["layer"] == layer]
    scores = run.scores[draft.name, layer]
    rows = scores[:, None] if scores.dim() == 1 else scores
    counted = ~rows[:, 0].isnan()
    how = draft.entry.get("reduce")
    if how is not None:
        counted &= _within(draft.entry.get("over", "request"), run)
    positions, rows = run.positions[counted], rows[counted]
    if how is not None and len(rows):
        made = {"mean": rows.mean(0), "max": rows.amax(0), "last": rows[-1]}
        positions, rows = positions[-1:], made[how][None]
    assert one["positions"] == positions.tolist()
    if len(rows):
        values = torch.tensor(one["values"]).reshape(len(rows), -1)
        torch.testing.assert_close(values, rows, **CLOSE)


def _within(over: str, run: Run) -> Tensor:
    is_prompt = run.positions < run.prompt_len
    return {"prompt": is_prompt, "generated": ~is_prompt}.get(over, is_prompt | True)


def _check_capture(
    one: Mapping[str, Any], wanted: list[tuple[str, int, Tensor]], run: Run
) -> None:
    chosen = torch.stack([mask for *_, mask in wanted]).any(dim=0)
    name, layer, _ = wanted[0]
    assert one["positions"] == chosen.nonzero()[:, 0].tolist()
    data = bytearray(base64.b64decode(one["data"]))
    values = torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)
    rows = run.rows[name, layer][chosen]
    assert one["shape"] == list(rows.shape)
    torch.testing.assert_close(values.reshape(rows.shape), rows, **CLOSE)
