"""Pictures of the records as SVG, the same bytes from the same numbers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from eyesplice.benchmarks.bench import VANILLA
from eyesplice.benchmarks.page import (
    Record,
    by_batch,
    case_of,
    filled,
    records_in,
    tables_of,
)
from eyesplice.benchmarks.records import Refused

_FOLDER: Final = "performance"
_SALT: Final = "eyesplice"
_SIZE: Final = (8.0, 3.6)
_LENGTHS: Final = 3
"""Of the longest bar, that a picture of bars is high at most above zero and below."""


def run(results: Path, page: Path, console: Console) -> None:
    """Draw every record and fill the page's tables.

    Args:
        results: folder of JSON files.
        page: a Markdown page with markers; pictures go to a folder beside it.
        console: for progress.

    Raises:
        Refused: no record, or no matplotlib.
    """
    found = records_in(results)
    if not found:
        raise Refused(f"no record of a case in {results}")
    pictures = {}
    for stem, record in found.items():
        target = page.parent / _FOLDER / f"{stem}.svg"
        if draw(stem, record, target):
            pictures[stem] = f"{_FOLDER}/{stem}.svg"
            console.print(f"drawn: {target}")
    page.write_text(filled(page.read_text(), tables_of(found, pictures)))
    console.print(f"filled: {page}")


def draw(stem: str, record: Record, target: Path) -> bool:
    """Draw one record; False for one that has no picture.

    Raises:
        Refused: no matplotlib.
    """
    artist = _ARTISTS.get(case_of(stem, record) or "")
    if artist is None:
        return False
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refused(
            "pictures need matplotlib: pip install 'eyesplice[bench]'"
        ) from error
    # Ids are hashes of a salt, and text stays text: no run's own and no font's shapes.
    with mpl.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        artist(record, axes)
        axes.spines[["top", "right"]].set_visible(False)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None})
    return True


def grouped_bars(
    axes: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float]]],
) -> None:
    """Bars side by side in each group, with error bars.

    Args:
        axes: of matplotlib.
        groups: their names.
        series: by name, for each group the percentage and the ends of its interval.
    """
    width = 0.8 / max(1, len(series))
    for place, (name, values) in enumerate(series.items()):
        at = [group + (place + 0.5) * width - 0.4 for group in range(len(groups))]
        heights = [value for value, _, _ in values]
        below = [max(0.0, value - low) for value, low, _ in values]
        above = [max(0.0, high - value) for value, _, high in values]
        errors = [below, above]
        axes.bar(at, heights, width, label=name, yerr=errors, error_kw={"lw": 0.8})
    # Intervals of few rounds can be a hundred times the bars: they end at the frame then.
    highest = max((abs(one[0]) for of in series.values() for one in of), default=0.0)
    if highest:
        bottom, top = axes.get_ylim()
        limit = _LENGTHS * highest
        axes.set_ylim(max(bottom, -limit), min(top, limit))
    axes.set_xticks(range(len(groups)), groups)
    axes.axhline(0, color="black", lw=0.8)
    axes.legend(fontsize=7, frameon=False, ncols=2)


def percentages(found: Record) -> tuple[float, float, float]:
    """Change over vanilla in percent, and its interval or the range of its rounds."""
    interval = found.get("interval") or [found.get("low"), found.get("high")]
    ends = [found["ratio"] if end is None else end for end in interval]
    value, low, high = (100 * (part - 1) for part in (found["ratio"], *ends))
    return value, low, high


def _steps(record: Record, axes: Any) -> None:
    results = by_batch(record)
    first = next(iter(results.values()))
    device = first[VANILLA]["device"]
    clock = "device" if device and device["ms"] else "wall"
    series = {
        case: [percentages(results[batch][case][clock]) for batch in results]
        for case in first
        if case != VANILLA
    }
    grouped_bars(axes, [f"batch {batch}" for batch in results], series)
    axes.set_ylabel(f"decode step over vanilla, % ({clock})")


def _serve(record: Record, axes: Any) -> None:
    rows = record["rows"]
    names = {"mean_itl_ms": "mean ITL", "p99_itl_ms": "P99 ITL", "mean_ttft_ms": "TTFT"}
    series = {
        name: [percentages(found["metrics"][key]) for found in rows.values()]
        for key, name in names.items()
    }
    grouped_bars(axes, list(rows), series)
    axes.set_ylabel("over vanilla, %")


def _kernel(record: Record, axes: Any) -> None:
    cells = [cell for cell in record["cells"] if "us" in cell]
    for hidden in sorted({cell["hidden"] for cell in cells}):
        line = [cell for cell in cells if cell["hidden"] == hidden]
        ratios = [cell["us"]["vectors 0"] / cell["us"]["inductor"] for cell in line]
        tokens = [cell["tokens"] for cell in line]
        axes.plot(tokens, ratios, marker="o", ms=3, label=f"hidden {hidden}")
    axes.set_xscale("log", base=2)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("idle boundary and GEMM over Inductor's")
    axes.legend(fontsize=7, frameon=False)


def _peers(record: Record, axes: Any) -> None:
    results = record["results"]
    axes.barh(list(results), [found["ms"] for found in results.values()])
    axes.invert_yaxis()
    axes.set_xlabel(f"ms per decode step, batch {record['batch']}")


_ARTISTS: Final[dict[str, Callable[[Record, Any], None]]] = {
    "decode": _steps,
    "configs": _steps,
    "layers": _steps,
    "serve": _serve,
    "kernel": _kernel,
    "peers": _peers,
}
