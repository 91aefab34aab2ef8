"""Capture under a load of prompts: throughput against vanilla's.

"last token" captures the prompt's last token at every layer's output, "every token" all
of them. A captured row is hidden x 2 bytes, so the second moves layers x hidden x 2 bytes
per token to the host: its engine has a ring with room for two steps of that.
"""

import statistics
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.bench import VANILLA, Bench, Pair
from eyesplice.benchmarks.intervals import against
from eyesplice.benchmarks.pairs import cell, check, extra_args
from eyesplice.benchmarks.records import Refused

WHEN: Final = {"last token": "last_token", "every token": "all"}
_TOKENS: Final = 4


def run(bench: Bench, prompts: int, prompt_tokens: int, every: int) -> dict[str, Any]:
    """Measure idle and both captures and write the record.

    Args:
        bench: options and engines.
        prompts: of a run.
        prompt_tokens: of each prompt.
        every: prompts of a run in which every token is captured.

    Raises:
        Refused: a failed check, or captured rows that are missing.
    """
    layers = bench.shape().layers
    step = min(_STEP, bench.arguments()["max_model_len"])
    pair = bench.pair(
        "capture",
        arguments={"max_num_batched_tokens": step},
        capture_rows=2 * step * layers,
    )
    record: dict[str, Any] = {
        "check": check(pair, layers),
        "rounds": bench.rounds,
        "prompt_tokens": prompt_tokens,
        "results": {},
    }
    for name, count in (("last token", prompts), ("every token", every)):
        record["results"][name] = _measure(
            bench, pair, name, layers, count, prompt_tokens
        )
        bench.write("capture", record)
    print_capture(bench.console, record["results"])
    return record


_STEP: Final = 2048
"""Tokens of the largest step."""


def _measure(
    bench: Bench, pair: Pair, name: str, layers: int, prompts: int, prompt_tokens: int
) -> dict[str, Any]:
    """Seconds of the same prompts by vanilla, idle, and with the capture."""
    read = {"read": "capture", "layers": "all", "submodule": "residual.post"}
    request = {"reads": [read | {"when": WHEN[name]}]}
    cases = {VANILLA: None, "idle": None, name: extra_args(request)}
    rows = prompts * layers
    if name == "every token":
        # The last token that is generated is never put in.
        rows *= prompt_tokens + _TOKENS - 1
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for number, case in bench.turns(cases, name):
        engine = pair.of(case)
        answer = engine.ask(
            "prefill",
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            max_tokens=_TOKENS,
            extra_args=cases[case],
            seed=number + 1,
        )
        expected = rows if case == name else 0
        if answer["rows"] != expected or answer["errors"]:
            raise Refused(
                f"no numbers: {answer['rows']} of {expected} rows were captured in "
                f"the case {case}: {answer['errors']}"
            )
        if number >= 0:
            seconds[case].append(answer["seconds"])
    return {
        case: {
            "tokens_per_second": prompts * prompt_tokens / statistics.median(of),
            "seconds": of,
            # Throughput is the inverse of time, and so is its ratio.
            **against(seconds[VANILLA], of),
            "rows": rows if case == name else 0,
        }
        for case, of in seconds.items()
    }


def print_capture(console: Console, results: Mapping[str, Any]) -> None:
    """Prompt tokens per second, and the ratio to vanilla's."""
    table = Table(title="prompt tokens per second (to vanilla)")
    table.add_column("load")
    table.add_column("case")
    table.add_column("tokens/s", justify="right")
    table.add_column("rows", justify="right")
    for load, cases in results.items():
        for case, found in cases.items():
            text = cell(case, f"{found['tokens_per_second']:.0f}", found)
            table.add_row(f"for {load}", case, text, str(found["rows"]))
    console.print(table)
