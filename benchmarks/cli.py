"""`eyesplice bench`: every case a command; several may follow one another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyesplice.integration.cli.launch import CommandError, require_engine

app = typer.Typer(
    chain=True,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Benchmarks against vanilla vLLM, paired in one run.

Each CASE writes JSON with machine and versions, prints medians and ratios with 95%
intervals, and prints no number when the check before it fails.
""",
)

Model = Annotated[
    Path,
    typer.Option(
        help="A model folder; with the load format dummy its config.json is enough."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of JSON files and logs.")]
LoadFormat = Annotated[str, typer.Option(help="vLLM's: dummy, auto, ...")]


def console() -> Console:
    """Where cases print."""
    return Console(width=140)


@contextmanager
def refusals() -> Iterator[None]:
    """Tell a refusal in its own words; without an engine there is nothing to measure."""
    from eyesplice.benchmarks.records import Refused

    require_engine()
    try:
        yield
    except (Refused, OSError, ValueError) as error:
        raise CommandError(str(error)) from error


@app.command("serve")
def serve_command(
    model: Model,
    dataset: Annotated[Path, typer.Option(help="A ShareGPT file, also one cut off.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer of a model that has none."),
    ] = None,
    out: Out = Path("bench"),
    rows: Annotated[
        str, typer.Option(help="Comma-separated: idle, names of packs, all.")
    ] = "",
    prompts: Annotated[int, typer.Option(help="Requests of a run.")] = 250,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    rate: Annotated[float, typer.Option(help="Requests per second, Poisson.")] = 10.0,
    runs: Annotated[int, typer.Option(help="Counted runs of each row.")] = 3,
    layers: Annotated[
        int | None,
        typer.Option(help="Keep so many decoder layers, for two servers to fit."),
    ] = None,
    load_format: LoadFormat = "dummy",
    cache_gib: Annotated[float, typer.Option(help="KV cache of each server.")] = 16.0,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks of each server.")] = 1,
    wait: Annotated[float, typer.Option(help="Seconds that a start may take.")] = 600.0,
    server_options: Annotated[
        str, typer.Option(help="Further options of both servers, as in a shell.")
    ] = "",
) -> None:
    """vLLM's own `vllm bench serve`, seven apps on one server, vanilla on another.

    It takes one start (about 110 s on an H200, cold, both servers at once), 3 s per row to
    check and warm up, and RUNS x (1 + rows) x (PROMPTS / RATE + 2) seconds. Rows of later
    calls are merged into the same file, each naming its sitting.
    """
    import shlex

    from eyesplice.benchmarks import serve

    settings = serve.Settings(
        model=model,
        dataset=dataset,
        tokenizer=tokenizer,
        rows=tuple(filter(None, rows.split(","))),
        prompts=prompts,
        output_tokens=output_tokens,
        rate=rate,
        runs=runs,
        layers=layers,
        load_format=load_format,
        cache_bytes=int(cache_gib * 2**30),
        tensor_parallel=tensor_parallel,
        wait=wait,
        server_options=tuple(shlex.split(server_options)),
    )
    with refusals():
        serve.print_record(serve.run(settings, out, console()), console())
