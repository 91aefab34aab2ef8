"""Start-up, cold and warm: seconds of compilation and until an engine serves.

Each engine has caches of its own, empty at its cold start and left for its warm one.
Whether a warm start loaded everything is part of the record: the pass does not run then,
and no compiled file is added.
"""

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.agreement import agreement
from eyesplice.benchmarks.bench import Bench
from eyesplice.benchmarks.intervals import against, percent, summary
from eyesplice.benchmarks.records import Refused

_CACHES: Final = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_COMPILED: Final = (".cubin", ".hsaco", ".ptx", ".so", ".o")
_ARTIFACT: Final = "artifact"
"""In the names of graphs that vLLM compiled."""

_VLLM_COMPILE: Final = "3"
"""`CompilationMode.VLLM_COMPILE` as an engine tells it."""

TIMES: Final = ("compile_seconds", "seconds")
KINDS: Final = ("cold", "warm")
ENGINES: Final = ("vanilla", "eyesplice")


def run(bench: Bench, starts: int) -> dict[str, Any]:
    """Start both engines cold and warm, one at a time, and write the record.

    Args:
        bench: options; its rounds are not used.
        starts: how often, each time with empty caches.

    Raises:
        Refused: an engine that does not start, or warm texts that are not vanilla's.
    """
    bench.close()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {kind: [] for kind in KINDS} for name in ENGINES
    }
    for number in range(starts):
        with tempfile.TemporaryDirectory(prefix="eyesplice-startup-") as folder:
            texts: dict[str, Any] = {}
            # Whoever starts first reads vLLM's files from the disk: by turns, we do.
            order = ENGINES if number % 2 else ENGINES[::-1]
            for kind in KINDS:
                for name in order:
                    start = _start(bench, name, kind, Path(folder) / name)
                    texts[name] = start.pop("texts")
                    found[name][kind].append(start)
                    bench.console.print(
                        f"start {number + 1} of {starts}, {name} {kind}: "
                        f"{start['seconds']:.1f} s; compiling: "
                        f"{seconds_of(start['compile_seconds'])}"
                    )
            checked = agreement(texts["vanilla"], texts["eyesplice"])
    record = {
        "check": checked,
        "warm_loaded": all(map(loaded, found["eyesplice"]["warm"])),
        "warm_traced": any(start["pass_ran"] for start in found["eyesplice"]["warm"]),
        "starts": found,
        "results": compare(found),
    }
    bench.write("startup", record)
    print_starts(bench.console, record)
    return record


def loaded(start: Mapping[str, Any]) -> bool:
    """Whether a start took everything compiled from the cache.

    Only vLLM's own compiler has a cache of graphs: with another one the pass runs always.
    """
    traced = start["pass_ran"] and start["mode"] == _VLLM_COMPILE
    return not traced and not start["new_compiled_files"]


def _start(bench: Bench, name: str, kind: str, caches: Path) -> dict[str, Any]:
    before = compiled_files(caches)
    engine = bench.start(
        f"startup-{name}-{kind}",
        config=None if name == "vanilla" else {},
        env={variable: str(caches / variable.lower()) for variable in _CACHES},
    )
    try:
        ready = engine.wait().ready
        rng = random.Random(3)
        prompts = [[rng.randrange(10, 500) for _ in range(32)] for _ in range(16)]
        answer = engine.generate(prompts, 16, [None] * len(prompts), logprobs=0)
    except RuntimeError as error:
        raise Refused(str(error)) from error
    finally:
        engine.close()
    texts = list(zip(answer["tokens"], answer["logprobs"], strict=True))
    return {
        **{key: ready[key] for key in (*TIMES, "pass_ran", "mode", "device")},
        "new_compiled_files": sorted(compiled_files(caches) - before) if before else [],
        "texts": texts,
    }


def compiled_files(caches: Path) -> set[str]:
    """Files of kernels and compiled graphs under a folder."""
    return {
        str(file.relative_to(caches))
        for file in caches.rglob("*")
        if file.is_file() and (file.suffix in _COMPILED or _ARTIFACT in file.name)
    }


def compare(
    found: Mapping[str, Mapping[str, list[dict[str, Any]]]],
) -> dict[str, dict[str, Any]]:
    """Seconds of both engines and their ratio, by kind of start and time."""
    return {
        kind: {time: _compared(found, kind, time) for time in TIMES} for kind in KINDS
    }


def _compared(
    found: Mapping[str, Mapping[str, list[dict[str, Any]]]], kind: str, time: str
) -> dict[str, Any]:
    base, own = ([start[time] for start in found[name][kind]] for name in ENGINES)
    # vLLM counts the time of its own compiler alone (`_VLLM_COMPILE`), else none.
    ratio = against(own, base) if all(base) and all(own) else None
    return {"vanilla": summary(base), "eyesplice": summary(own), "against": ratio}


def seconds_of(time: float) -> str:
    """A time as tables have it; 0 is what vLLM says where it counts none."""
    return f"{time:.2f}" if time else "not counted"


def print_starts(console: Console, record: Mapping[str, Any]) -> None:
    """Seconds cold and warm, the ratio to vanilla's, and whether a warm start loaded."""
    table = Table(title="start-up: median seconds")
    for column in ("start", "time", *ENGINES, "to vanilla"):
        table.add_column(column)
    for kind, times in record["results"].items():
        for time, found in times.items():
            seconds = [seconds_of(found[name]["median"]) for name in ENGINES]
            ratio = "-" if found["against"] is None else percent(found["against"])
            what = "compiling" if time == "compile_seconds" else "until it serves"
            table.add_row(kind, what, *seconds, ratio)
    console.print(table)
    console.print(f"a warm start of eyesplice {warm(record)}")


def warm(record: Mapping[str, Any]) -> str:
    """What a warm start of eyesplice does."""
    if not record["warm_loaded"]:
        return "COMPILES AGAIN"
    if record["warm_traced"]:
        return "traces the model again and adds no compiled file"
    return "loads everything"
