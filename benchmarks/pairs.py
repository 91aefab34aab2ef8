"""Checks of a pair of engines, and decode steps of both by turns."""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.agreement import Text, agreement
from eyesplice.benchmarks.batches import SETTLE
from eyesplice.benchmarks.bench import VANILLA, VECTOR_SIZE, Bench, Pair
from eyesplice.benchmarks.engines import EngineProcess
from eyesplice.benchmarks.intervals import against, percent
from eyesplice.benchmarks.records import Refused

Cases = Mapping[str, Sequence[Mapping[str, Any]] | None]
"""Case to the request objects that its requests take in turn. An empty list is idle,
and None runs on the vanilla engine."""

_PROGRAMS: Final = 8
_STRONG: Final = 10.0
"""Standard deviation of the vectors that a check adds: any output changes."""

_CLOCKS: Final = {"wall": "wall clock", "device": "CUDA graph on the device"}


def write(
    vector: str, layers: Any, submodule: str = "residual.post", scale: float = 1.0
) -> dict[str, Any]:
    """One entry of a request's `writes`."""
    return {"vector": vector, "layers": layers, "submodule": submodule, "scale": scale}


def asking(*writes: Mapping[str, Any]) -> dict[str, Any]:
    """A request's object."""
    return {"writes": [dict(item) for item in writes]}


def extra_args(request: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A request's object as `SamplingParams` takes it."""
    return None if request is None else {"eyesplice": dict(request)}


def check(pair: Pair, layers: int, *, prompts: int = 64, tokens: int = 64) -> Any:
    """Refuse to measure unless idle equals vanilla and each request gets its own vector.

    Args:
        pair: the engines.
        layers: decoder layers of the model.
        prompts: to compare, in one batch.
        tokens: greedy ones of each.

    Raises:
        Refused: idle outputs differ from vanilla's, a steered one does not, or two
            requests with one program in one batch differ.
    """
    rng = random.Random(1)
    asked = [[rng.randrange(10, 500) for _ in range(48)] for _ in range(prompts)]
    expected = _texts(pair.vanilla, asked, tokens)
    agreed = agreement(expected, _texts(pair.spliced, asked, tokens))
    return {**agreed, "tokens": tokens, **_steers(pair, layers)}


def _texts(engine: EngineProcess, prompts: list[list[int]], tokens: int) -> list[Text]:
    answer = engine.generate(prompts, tokens, [None] * len(prompts), logprobs=0)
    return list(zip(answer["tokens"], answer["logprobs"], strict=True))


def _steers(pair: Pair, layers: int) -> dict[str, Any]:
    """One prompt 16 times, with 8 strong programs: equal programs give equal texts."""
    rng = random.Random(2)
    prompt = [rng.randrange(10, 500) for _ in range(48)]
    scale = _STRONG / VECTOR_SIZE
    programs = [
        extra_args(asking(write(f"v{i}", layers // 2, scale=scale)))
        for i in range(_PROGRAMS)
    ]
    batch = [prompt] * (2 * _PROGRAMS + 1)
    answer = pair.spliced.generate(batch, 16, [*programs, *programs, None])
    texts = [tuple(tokens) for tokens in answer["tokens"]]
    first, second, plain = texts[:_PROGRAMS], texts[_PROGRAMS:-1], texts[-1]
    steered = sum(text != plain for text in first)
    if first != second or not steered or len(set(first)) < 2:
        raise Refused(
            f"no numbers: of {_PROGRAMS} strong programs {steered} change the output, "
            f"{len(set(first))} differ from one another, and "
            f"{sum(a == b for a, b in zip(first, second, strict=True))} repeat"
        )
    return {"programs": _PROGRAMS, "steered": steered, "distinct": len(set(first))}


def checked(bench: Bench, pair: Pair, **settings: Any) -> dict[str, Any]:
    """A record without results yet, of a pair that passes the check.

    Args:
        bench: options.
        pair: the engines.
        settings: what else to note.

    Raises:
        Refused: see `check`.
    """
    return {
        "check": check(pair, bench.shape().layers),
        "engines": pair.ready(),
        "rounds": bench.rounds,
        **settings,
        "results": {},
    }


def measure(
    bench: Bench,
    pair: Pair,
    cases: Cases,
    batch: int,
    steps: int,
    prompt_tokens: int = 64,
) -> dict[str, dict[str, Any]]:
    """Every case's decode step in `bench.rounds` rounds, each round in another order.

    Args:
        bench: for rounds and progress.
        pair: the engines.
        cases: "vanilla" among them.
        batch: requests.
        steps: tokens that each generates; the first `SETTLE` do not count.
        prompt_tokens: of each prompt. All cases of a round have the same prompts.

    Raises:
        Refused: a request of an active case on which no write acted, or a batch of which
            no step was timed.
    """
    times: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in cases} for clock in _CLOCKS
    }
    for number, name in bench.turns(cases, f"batch {batch}"):
        requests = cases[name]
        engine = pair.of(name)
        answer = engine.decode(
            batch=batch,
            prompt_tokens=prompt_tokens,
            steps=steps,
            extra_args=[extra_args(r) for r in requests or ()] or [None],
            seed=1000 * batch + number,
            name=f"{name}-{number}",
        )
        if requests and answer["acted"] != batch:
            raise Refused(
                f"no numbers: writes acted on {answer['acted']} of {batch} requests "
                f"of the case {name}"
            )
        if not answer["seconds"]:
            raise Refused(
                f"no numbers: {steps} tokens each hold no decode step of all {batch} "
                f"requests after the first {SETTLE}. Ask for more steps, or for a "
                "batch that the engine's max_num_seqs has room for"
            )
        if number >= 0:  # The first round warms up.
            times["wall"][name].append(_median(answer["seconds"]))
            times["device"][name].append(_median(answer["device_seconds"]))
    return {
        name: {clock: compared(of[name], of[VANILLA]) for clock, of in times.items()}
        | {"tokens_per_second": batch / statistics.median(times["wall"][name])}
        for name in cases
    }


def run_steps(
    bench: Bench, case: str, cases: Cases, batches: Sequence[int], steps: int
) -> dict[str, Any]:
    """Check the pair, measure every batch, write the record and print the table.

    Args:
        bench: options and engines.
        case: names the record.
        cases: "vanilla" among them.
        batches: requests. The record is written after each.
        steps: tokens of each request.

    Raises:
        Refused: a failed check.
    """
    pair = bench.pair()
    record = checked(bench, pair, steps=steps)
    for batch in batches:
        record["results"][str(batch)] = measure(bench, pair, cases, batch, steps)
        bench.write(case, record)
    title = f"decode step, {bench.require_model().name}"
    print_tables(bench.console, title, record["results"])
    return record


def _median(seconds: Sequence[float]) -> float:
    """0 where nothing was timed: the V1 runner and CPUs replay no graph of ours."""
    return statistics.median(seconds) if seconds else 0.0


def compared(values: Sequence[float], base: Sequence[float]) -> dict[str, Any] | None:
    """Median milliseconds, and ratios to `base` of the same rounds.

    Args:
        values: seconds, one per round.
        base: vanilla's.

    Returns:
        None where nothing was timed. `low` and `high` are the extreme ratios.
    """
    if not all(values) or not all(base):
        return None
    ratios = [v / b for v, b in zip(values, base, strict=True)]
    return {
        "ms": 1e3 * statistics.median(values),
        **against(values, base),
        "low": min(ratios),
        "high": max(ratios),
        "all_ms": [1e3 * v for v in values],
    }


def print_tables(
    console: Console,
    title: str,
    results: Mapping[str, Mapping[str, Any]],
    clocks: Mapping[str, str] = _CLOCKS,
    across: str = "batch",
) -> None:
    """A table for each clock: cases down, what is varied across.

    Args:
        console: to print to.
        title: of every table.
        results: what `compared` gives, by column, case and clock.
        clocks: their names in the title.
        across: what stands before each column's value.
    """
    cases = next(iter(results.values()))
    for clock, clock_name in clocks.items():
        if any(rows[VANILLA][clock] is None for rows in results.values()):
            continue
        table = Table(title=f"{title}, {clock_name}: ms (to vanilla, 95% interval)")
        table.add_column("case")
        for value in results:
            table.add_column(f"{across} {value}", justify="right")
        for name in cases:
            found = [rows[name][clock] for rows in results.values()]
            table.add_row(name, *(cell(name, f"{of['ms']:.3f}", of) for of in found))
        console.print(table)


def cell(case: str, text: str, found: Mapping[str, Any]) -> str:
    """The text of a case's number, with its ratio to vanilla's unless it is vanilla's."""
    return text if case == VANILLA else f"{text} ({percent(dict(found))})"
