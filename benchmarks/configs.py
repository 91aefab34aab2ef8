"""Distinct programs in one full batch: 0, 1, 16, 64 and 256 of them in 256 requests.

Each program adds its own vector, at one layer or at every layer's output. Request i
runs program i modulo their number.
"""

from collections.abc import Sequence
from typing import Any

from eyesplice.benchmarks.bench import VANILLA, VECTORS, Bench
from eyesplice.benchmarks.pairs import asking, run_steps, write
from eyesplice.benchmarks.records import Refused


def run(
    bench: Bench, batch: int, steps: int, programs: Sequence[int]
) -> dict[str, Any]:
    """Measure every number of programs and write the record.

    Args:
        bench: options and engines.
        batch: requests; larger numbers of programs are left out.
        steps: tokens of each request.
        programs: numbers of distinct programs.

    Raises:
        Refused: a failed check, or more programs than there are vectors.
    """
    if max(programs) > VECTORS:
        raise Refused(f"{max(programs)} programs: there are {VECTORS} vectors")
    layers = bench.shape().layers
    cases = cases_of(layers, [n for n in programs if n <= batch])
    return run_steps(bench, "configs", cases, [batch], steps)


def cases_of(layers: int, programs: Sequence[int]) -> dict[str, Any]:
    """Vanilla, idle, and each number of programs at one layer and at all."""
    cases: dict[str, Any] = {VANILLA: None, "0 programs": []}
    for where, at in (("one layer", layers // 2), ("all layers", "all")):
        for number in programs:
            plural = "s" * (number > 1)
            cases[f"{number} program{plural}, {where}"] = [
                asking(write(f"v{i}", at)) for i in range(number)
            ]
    return cases
