"""Steps that hold prompts: vanilla vLLM against eyesplice idle and active.

Serving mixes prompts with requests that decode. A step with more tokens than vLLM has
CUDA graphs for waits for the host at each kernel, so what an op costs there is not what
it costs in a decode step. A cycle is one step with a new prompt and the decode steps after
it; it is timed whole by the wall clock, and the step with the prompt on the host.
"""

import statistics
from collections.abc import Sequence
from typing import Any, Final

from eyesplice.benchmarks.bench import VANILLA, Bench, Pair
from eyesplice.benchmarks.decode import cases_of
from eyesplice.benchmarks.pairs import (
    checked,
    compared,
    extra_args,
    print_tables,
)
from eyesplice.benchmarks.prompts_child import tokens_beside
from eyesplice.benchmarks.records import Refused

CLOCKS: Final = {
    "wall": "a cycle by the wall clock",
    "host": "the step with the prompt, on the host",
}


def run(bench: Bench, sizes: Sequence[int], batch: int, cycles: int) -> dict[str, Any]:
    """Measure every case, write the record `prompts-MODEL.json` and print the tables.

    Args:
        bench: options and engines.
        sizes: tokens of the prompts.
        batch: requests that decode meanwhile.
        cycles: of each run.

    Raises:
        Refused: a failed check, or requests that are longer than the engines allow.
    """
    allowed = bench.arguments()["max_model_len"]
    # A prompt's request has one token besides.
    needed = max(max(sizes) + 1, tokens_beside(cycles))
    if needed > allowed:
        raise Refused(
            f"prompts of {max(sizes)} tokens and {cycles} cycles need requests of {needed} "
            f"tokens, and max_model_len is {allowed}. Ask for fewer, or give "
            "--engine '{\"max_model_len\": ...}'"
        )
    pair = bench.pair()
    record = checked(bench, pair, batch=batch, cycles=cycles)
    cases = {
        name: requests and requests[0]
        for name, requests in cases_of(bench.shape().layers).items()
    }
    for size in sizes:
        record["results"][str(size)] = _measure(bench, pair, cases, size, batch, cycles)
        bench.write("prompts", record)
    title = f"steps with prompts, {bench.require_model().name}"
    print_tables(bench.console, title, record["results"], CLOCKS, "prompt of")
    return record


def _measure(
    bench: Bench, pair: Pair, cases: Any, size: int, batch: int, cycles: int
) -> dict[str, dict[str, Any]]:
    times: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in cases} for clock in CLOCKS
    }
    for number, name in bench.turns(cases, f"{size} tokens"):
        engine = pair.of(name)
        answer = engine.ask(
            "cycles",
            batch=batch,
            prompt_tokens=size,
            cycles=cycles,
            extra_args=extra_args(cases[name] or None),
            seed=1000 * size + number,
            name=f"{name}-{number}",
        )
        if cases[name] and answer["acted"] != cycles:
            raise Refused(
                f"no numbers: writes acted on {answer['acted']} of {cycles} prompts "
                f"of the case {name}"
            )
        if len(answer["host_seconds"]) != cycles:
            raise Refused(
                f"no numbers: {cycles} prompts of {size} tokens took "
                f"{len(answer['host_seconds'])} steps. Ask for prompts that the "
                "engine's max_num_batched_tokens has room for"
            )
        if number >= 0:  # The first round warms up.
            times["wall"][name].append(statistics.median(answer["seconds"]))
            times["host"][name].append(statistics.median(answer["host_seconds"]))
    return {
        name: {clock: compared(of[name], of[VANILLA]) for clock, of in times.items()}
        for name in cases
    }
