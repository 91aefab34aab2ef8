"""What the cases of `eyesplice bench` share on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from eyesplice.integration.cli.launch import CommandError, require_engine

SHARED: Final = "eyesplice.bench"
"""Where the root's context keeps the `Bench` of a chain."""

Batches = Annotated[str, typer.Option(help="Requests of a batch, comma-separated.")]
Steps = Annotated[
    int,
    typer.Option(
        min=1, help="Tokens of each request; decode steps after the 8th count."
    ),
]


def numbers(text: str) -> list[int]:
    """The numbers of a comma-separated list, all of them at least 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"{text!r} is not a list of numbers: write 1,8,64") from None
    if min(found) < 1:
        raise CommandError(f"{text!r} holds a number below 1: write 1,8,64")
    return found


def bench_of(context: typer.Context) -> Any:
    """The `Bench` that all cases of a chain share."""
    return context.find_root().meta[SHARED]


def arguments(text: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM` in a JSON object."""
    import json

    try:
        found = json.loads(text)
    except ValueError as error:
        raise CommandError(f"--engine {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(
            f"--engine {text!r} is not a JSON object: write '{{\"max_num_seqs\": 64}}'"
        )
    return found


@contextmanager
def refusals(*, engine: bool = True) -> Iterator[None]:
    """Tell a refusal in its own words.

    Args:
        engine: whether vLLM must be installed.
    """
    from eyesplice.benchmarks.records import Refused

    if engine:
        require_engine()
    try:
        yield
    except (Refused, OSError, RuntimeError, ValueError) as error:
        raise CommandError(str(error)) from error
