"""Decode step of a full batch: vanilla vLLM against eyesplice idle and active.

    python benchmarks/decode.py --model MODEL --out benchmarks/results/decode.json

Two engines share the GPU, one without the plugin and one with every boundary armed, and
take turns: in each round every case runs once, in another order. A case's number is the
median over rounds of the median step; its ratio is the median over rounds of its step
over vanilla's step of the same round. The wall clock of a step includes the host, which
jumps between levels from run to run; the device's time of the replayed CUDA graph does
not. Both are given. Nothing is printed unless idle tokens equal
vanilla's and a steered request differs.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from eyesplice.benchmarks.engines import EngineProcess

VANILLA = "vanilla"


def main() -> None:
    """Measure every case and write the table and the JSON file."""
    options = _options()
    folder = Path(tempfile.mkdtemp())
    config = json.loads((options.model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    torch.manual_seed(0)
    vectors = {f"v{i}": torch.randn(hidden) * 0.01 for i in range(4)}
    for name, vector in vectors.items():
        save_file({name: vector}, folder / f"{name}.safetensors")
    common: dict[str, Any] = {
        "model": str(options.model),
        "load_format": options.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 256,
        # A fixed cache instead of memory profiling: both engines start at once.
        "kv_cache_memory_bytes": 16 << 30,
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    logs = options.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    switch: dict[str, Any] = {
        "additional_config": {"eyesplice": {"vectors": str(folder)}}
    }
    vanilla = EngineProcess(
        VANILLA, logs / "decode-vanilla.log", plugin=False, **common
    )
    spliced = EngineProcess(
        "eyesplice", logs / "decode-eyesplice.log", plugin=True, **common, **switch
    )
    vanilla.wait()
    spliced.wait()
    check = _check(vanilla, spliced, layers)
    cases = _cases(layers)
    results = {
        str(batch): _measure(vanilla, spliced, cases, batch, options)
        for batch in options.batches
    }
    record = {
        "model": options.model.name,
        "engines": {VANILLA: vanilla.ready, "eyesplice": spliced.ready},
        "check": check,
        "rounds": options.rounds,
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=1))
    _print(record)
    vanilla.close()
    spliced.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--load-format", default="dummy")
    return parser.parse_args()


def _write(vector: str, layers: Any, submodule: str) -> dict[str, Any]:
    return {"vector": vector, "layers": layers, "submodule": submodule, "scale": 1.0}


def _cases(layers: int) -> dict[str, list[dict[str, Any]] | None]:
    """The writes of each case; None runs on the vanilla engine."""

    def everywhere(vector: str) -> list[dict[str, Any]]:
        # The boundaries after attention and after the MLP: 2 per layer.
        return [
            _write(vector, "all", "residual.mid"),
            _write(vector, "all", "residual.post"),
        ]

    return {
        VANILLA: None,
        "idle": [],
        "one layer, 1 vector": [_write("v0", layers // 2, "residual.post")],
        "all boundaries, 1 vector": everywhere("v0"),
        "all boundaries, 4 vectors": [w for i in range(4) for w in everywhere(f"v{i}")],
    }


def _check(
    vanilla: EngineProcess, spliced: EngineProcess, layers: int
) -> dict[str, Any]:
    """Refuse to measure unless idle equals vanilla and a write changes the output."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 500) for _ in range(48)] for _ in range(64)]
    idle = [None] * len(prompts)
    expected = vanilla.generate(prompts, 64, idle)["tokens"]
    same = spliced.generate(prompts, 64, idle)["tokens"]
    equal = sum(a == b for a, b in zip(expected, same, strict=True))
    strong = _write("v0", layers // 2, "residual.post") | {"scale": 1000.0}
    steered = [{"eyesplice": {"writes": [strong]}}] * len(prompts)
    changed = spliced.generate(prompts, 8, steered)["tokens"]
    differing = sum(a[:8] != b for a, b in zip(expected, changed, strict=True))
    if equal < len(prompts) or not differing:
        raise SystemExit(
            f"no numbers: {equal} of {len(prompts)} idle outputs equal vanilla's, "
            f"{differing} steered outputs differ"
        )
    return {"prompts": len(prompts), "tokens": 64, "equal": equal, "steered": differing}


def _measure(
    vanilla: EngineProcess,
    spliced: EngineProcess,
    cases: dict[str, list[dict[str, Any]] | None],
    batch: int,
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    wall: dict[str, list[float]] = {name: [] for name in cases}
    device: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(-1, options.rounds):
        order = list(cases)
        random.Random(round_number).shuffle(order)
        for place, name in enumerate(order):
            writes = cases[name]
            extra = {"eyesplice": {"writes": writes}} if writes else None
            engine = vanilla if name == VANILLA else spliced
            answer = engine.decode(
                batch=batch,
                prompt_tokens=64,
                steps=options.steps,
                extra_args=[extra],
                seed=1000 * batch + 10 * round_number + place + 100,
            )
            if round_number >= 0:  # The first round warms up.
                wall[name].append(statistics.median(answer["seconds"]))
                device[name].append(
                    statistics.median(answer["device_seconds"] or [0.0])
                )
    return {
        name: {
            "wall": _against(wall[name], wall[VANILLA]),
            "device": _against(device[name], device[VANILLA]),
        }
        for name in cases
    }


def _against(values: list[float], base: list[float]) -> dict[str, Any]:
    """Median milliseconds, and the ratios to vanilla's of the same rounds."""
    ratios = [v / b for v, b in zip(values, base, strict=True)] if all(base) else [1.0]
    return {
        "ms": 1e3 * statistics.median(values),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "all_ms": [1e3 * v for v in values],
    }


def _print(record: dict[str, Any]) -> None:
    for clock, title in (
        ("wall", "wall clock"),
        ("device", "CUDA graph on the device"),
    ):
        table = Table(title=f"decode step, {record['model']}, {title}: ms (to vanilla)")
        table.add_column("case")
        for batch in record["results"]:
            table.add_column(f"batch {batch}", justify="right")
        for name in next(iter(record["results"].values())):
            cells = [
                f"{rows[name][clock]['ms']:.3f} "
                f"({100 * (rows[name][clock]['ratio'] - 1):+.2f}%)"
                for rows in record["results"].values()
            ]
            table.add_row(name, *cells)
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
