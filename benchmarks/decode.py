"""Decode step of a full batch: vanilla vLLM against eyesplice idle and active.

    python benchmarks/decode.py --model MODEL --out benchmarks/results/decode.json

Two engines share the GPU, one without the plugin and one with every boundary armed, and
take turns: in each round every case runs once, in another order. A case's number is the
median over rounds of the median step; its ratio is the median over rounds of its step
over vanilla's step of the same round, with the 95% interval of the mean (log) ratio. The
wall clock of a step includes the host, which jumps between levels from run to run; the
device's time of the replayed CUDA graph does not. Both are given. Nothing is printed
unless idle texts are vanilla's and steered requests differ.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from eyesplice.benchmarks.bench import VANILLA, Bench
from eyesplice.benchmarks.pairs import asking, run_steps, write
from eyesplice.benchmarks.records import Refused


def main() -> None:
    """Measure every case and write the table and the JSON file."""
    options = _options()
    bench = Bench(
        out=options.out.parent,
        console=Console(width=140),
        model=options.model,
        load_format=options.load_format,
        rounds=options.rounds,
    )
    try:
        run(bench, options.batches, options.steps)
    except Refused as error:
        raise SystemExit(str(error)) from error
    finally:
        bench.close()
    (bench.out / f"decode-{options.model.name}.json").replace(options.out)


def run(bench: Bench, batches: Sequence[int], steps: int) -> dict[str, Any]:
    """Measure every case, write the record `decode-MODEL.json` and print the table.

    Args:
        bench: options and engines.
        batches: requests.
        steps: tokens of each request.

    Raises:
        Refused: a failed check.
    """
    return run_steps(bench, "decode", cases_of(bench.shape().layers), batches, steps)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--load-format", default="dummy")
    return parser.parse_args()


def cases_of(layers: int) -> dict[str, Any]:
    """The request of each case; None runs on the vanilla engine."""

    def everywhere(vector: str) -> list[dict[str, Any]]:
        # The boundaries after attention and after the MLP: 2 per layer.
        return [
            write(vector, "all", "residual.mid"),
            write(vector, "all", "residual.post"),
        ]

    four = [w for i in range(4) for w in everywhere(f"v{i}")]
    return {
        VANILLA: None,
        "idle": [],
        "one layer, 1 vector": [asking(write("v0", layers // 2))],
        "all boundaries, 1 vector": [asking(*everywhere("v0"))],
        "all boundaries, 4 vectors": [asking(*four)],
    }


if __name__ == "__main__":
    main()
