"""Kernels of a decode step, vanilla's beside those of an idle and an active engine.

A trace says where a difference comes from; how large it is, `decode` says, since tracing
itself takes time.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.bench import VANILLA, Bench
from eyesplice.benchmarks.decode import cases_of
from eyesplice.benchmarks.pairs import extra_args
from eyesplice.benchmarks.records import Refused


def run(bench: Bench, batches: Sequence[int]) -> dict[str, Any]:
    """Trace every case of `decode` at every batch and write the record.

    Args:
        bench: options and engines.
        batches: requests.

    Raises:
        Refused: an engine that replays no graph of a whole step.
    """
    pair = bench.pair()
    cases = cases_of(bench.shape().layers)
    results: dict[str, dict[str, Any]] = {}
    for batch in batches:
        results[str(batch)] = {}
        for name, requests in cases.items():
            engine = pair.of(name)
            asked = [extra_args(request) for request in requests or ()] or [None]
            answer = engine.ask("kernels", batch=batch, extra_args=asked)
            if not answer["kernels"]:
                raise Refused(
                    "no kernels: this engine replays no graph of a step, or has no room "
                    f"for {batch} requests at once"
                )
            results[str(batch)][name] = summary(answer["kernels"], answer["replays"])
    record = {"engines": pair.ready(), "results": results}
    bench.write("trace", record)
    for size, found in results.items():
        print_trace(bench.console, size, found)
    return record


def summary(kernels: Sequence[Sequence[Any]], replays: int) -> dict[str, Any]:
    """Calls a step, median duration and median gap before it, of each kernel by name.

    Args:
        kernels: start and duration in us and a name each, in order, of all replays.
        replays: how many.

    Returns:
        `kernels` by name, and `us` of a replay from the first start to the last end.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    end = None
    for start, duration, name in kernels:
        durations[name].append(duration)
        if end is not None:
            gaps[name].append(start - end)
        end = start + duration
    # Kernels overlap: the one that began last need not be the last to end.
    last = max(start + duration for start, duration, _ in kernels)
    return {
        "us": (last - kernels[0][0]) / replays,
        "kernels": {
            name: {
                "calls": len(of) / replays,
                "us": statistics.median(of),
                "gap_us": statistics.median(gaps[name]) if gaps[name] else 0.0,
                "sum_us": (sum(of) + sum(gaps[name])) / replays,
            }
            for name, of in durations.items()
        },
    }


def print_trace(
    console: Console, batch: str, found: Mapping[str, Mapping[str, Any]]
) -> None:
    """A table per case: kernels by their share of the step."""
    for case, one in found.items():
        title = f"batch {batch}, {case}: {one['us']:.0f} us a step"
        if case != VANILLA:
            title += f" ({one['us'] - found[VANILLA]['us']:+.0f})"
        table = Table(title=title)
        for column in ("kernel", "calls", "us", "gap before", "sum"):
            table.add_column(column, justify="left" if column == "kernel" else "right")
        largest = sorted(one["kernels"].items(), key=lambda item: -item[1]["sum_us"])
        for name, of in largest[:12]:
            table.add_row(
                re.sub(r"<.*|\(.*", "", name)[:60],
                f"{of['calls']:.0f}",
                f"{of['us']:.2f}",
                f"{of['gap_us']:.2f}",
                f"{of['sum_us']:.1f}",
            )
        console.print(table)
