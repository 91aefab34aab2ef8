"""One vector at 1, 4, 16 and all layers' outputs, all requests."""

from collections.abc import Sequence
from typing import Any, Final

from eyesplice.benchmarks.bench import VANILLA, Bench
from eyesplice.benchmarks.pairs import asking, run_steps, write

LAYERS: Final = (1, 4, 16)


def run(bench: Bench, batches: Sequence[int], steps: int) -> dict[str, Any]:
    """Measure every number of layers and write the record.

    Args:
        bench: options and engines.
        batches: requests.
        steps: tokens of each request.

    Raises:
        Refused: a failed check.
    """
    return run_steps(bench, "layers", cases_of(bench.shape().layers), batches, steps)


def cases_of(layers: int) -> dict[str, Any]:
    """Vanilla, idle, and one vector at layers spread evenly over the model."""
    cases: dict[str, Any] = {VANILLA: None, "idle": []}
    for number in sorted({*(n for n in LAYERS if n < layers), layers}):
        cases[_name(number)] = [asking(write("v0", spread(number, layers)))]
    return cases


def spread(number: int, layers: int) -> list[int]:
    """`number` layers out of `layers`, evenly spread, each in the middle of its part."""
    return [(2 * i + 1) * layers // (2 * number) for i in range(number)]


def _name(number: int) -> str:
    return f"{number} layer" + "s" * (number > 1)
