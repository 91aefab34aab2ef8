"""The host's part of a step: time of eyesplice's hooks, its launches and its copies.

Hook times are eyesplice's own code between vLLM's, in the process of the engine.
Launches and copies are counted by the profiler, vanilla's in the same step taken off.
Expected, and not checked: none when idle, one launch and one copy when active.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.bench import Bench, Pair
from eyesplice.benchmarks.intervals import summary
from eyesplice.benchmarks.pairs import asking, check, extra_args, write
from eyesplice.benchmarks.records import Refused

COUNTS: Final = ("launches", "host_to_device", "device_to_host")
_PROFILED: Final = 17
_PROMPT: Final = 16


def run(bench: Bench, batches: Sequence[int], steps: int) -> dict[str, Any]:
    """Measure idle and active batches and write the record.

    Args:
        bench: options; its rounds are not used.
        batches: requests.
        steps: decode steps that are timed.

    Raises:
        Refused: a failed check, or a batch of which no step was timed.
    """
    pair = bench.pair("host", clock=True)
    layers = bench.shape().layers
    checked = check(pair, layers)
    cases: dict[str, list[Any]] = {
        "idle": [None],
        "one program": [asking(write("v0", layers // 2))],
        "a program each": [asking(write(f"v{i}", layers // 2)) for i in range(256)],
    }
    results: dict[str, Any] = {}
    record = {"check": checked, "steps": steps, "results": results}
    for batch in batches:
        results[str(batch)] = {
            name: _measure(pair, batch, steps, [extra_args(r) for r in requests])
            for name, requests in cases.items()
        }
        bench.write("host", record)
    print_host(bench.console, results)
    return record


def _measure(
    pair: Pair, batch: int, steps: int, extra: list[dict[str, Any] | None]
) -> dict[str, Any]:
    asked = {"batch": batch, "prompt_tokens": _PROMPT}
    hooks = pair.spliced.ask(
        "hooks", **asked, num_steps=steps, extra_args=extra, seed=batch
    )
    if not any(hooks.values()):
        raise Refused(
            f"no numbers: of {steps} steps of {batch} requests none was timed. Ask for "
            "more, or for a batch that the engine's max_num_seqs has room for"
        )
    asked |= {"num_steps": _PROFILED, "seed": 1000 + batch}
    answers = [
        pair.spliced.ask("calls", **asked, extra_args=extra),
        pair.vanilla.ask("calls", **asked, extra_args=[None]),
    ]
    own, base = (answer["calls"] for answer in answers)
    return {
        "microseconds": microseconds(hooks),
        "calls": own,
        "vanilla_calls": base,
        "more_calls": more_calls(own, base),
        "not_profiled": answers[0]["error"] or answers[1]["error"],
    }


def microseconds(hooks: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Per step: all hooks together, and the median of each.

    Args:
        hooks: seconds of each hook in every step.
    """
    per_step = [1e6 * sum(step) for step in zip(*hooks.values(), strict=True)]
    whole = summary(per_step) if per_step else {"median": 0.0, "interval": None}
    whole.pop("values", None)
    return whole | {
        "hooks": {k: 1e6 * statistics.median(v) for k, v in hooks.items() if v}
    }


def more_calls(
    own: Mapping[str, float] | None, base: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Launches and copies per step over vanilla's; None without a GPU."""
    if own is None or base is None:
        return None
    return {name: round(own[name] - base[name], 3) for name in COUNTS}


def print_host(console: Console, results: Mapping[str, Any]) -> None:
    """A row for each batch and case."""
    table = Table(
        title="eyesplice's host code per decode step, and calls over vanilla's"
    )
    table.add_column("batch", justify="right")
    table.add_column("case")
    for column in ("us", *COUNTS):
        table.add_column(column.replace("_", " "), justify="right")
    for batch, cases in results.items():
        for name, found in cases.items():
            more = found["more_calls"]
            counts = [f"{more[c]:+g}" if more else "-" for c in COUNTS]
            table.add_row(
                batch, name, f"{found['microseconds']['median']:.1f}", *counts
            )
    console.print(table)
