"""`eyesplice inspect`: which sites a model has, and how each is armed."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from eyesplice.integration.cli import tables
from eyesplice.integration.cli.jobs import InspectJob
from eyesplice.integration.cli.launch import CommandError, engine, require_engine
from eyesplice.integration.cli.steps import step

_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")

_DUMP_HELP: Final = (
    "Write to this folder: graph_before.py and graph_after.py (the whole model as Dynamo "
    "traced it, around the splice), graph.diff (what the splice changed), sites.json "
    "(what --json prints) and compiled/ (the code that runs, made readable by depyf: "
    "transformed_code.py on a CPU, also each piece with its kernels on a GPU)."
)


def inspect_command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A model's folder (its config.json is enough) or its name on a hub.",
        ),
    ],
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites",
            help="Arm only these submodules or TransformerLens names (repeat the option "
            "or separate by commas); one that the model lacks is an error. Default: "
            "all, and those that the model lacks are listed with the reason.",
        ),
    ] = None,
    app: Annotated[
        list[Path] | None,
        typer.Option(help="Deploy this app too: shows where its own ops run."),
    ] = None,
    op_module: Annotated[
        list[str] | None,
        typer.Option(help="Import this module, which registers ops of your own."),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="The model's dtype, as vLLM takes it.")
    ] = "auto",
    every: Annotated[
        bool, typer.Option("--all", help="One row per site instead of per submodule.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")
    ] = False,
    dump: Annotated[Path | None, typer.Option("--dump", help=_DUMP_HELP)] = None,
    eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager",
            help="Show what a server started with --enforce-eager has: no graph, hooks "
            "on modules.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the engine's log.")
    ] = False,
) -> None:
    """Show every site of a model: form, shape, node, or why it is missing.

    Starts vLLM with dummy weights, lets it compile the model and reads the table of the
    splice and the hooks. No weights, tokenizer or network needed; the model must fit in
    memory.
    """
    require_engine()
    if eager and dump is not None:
        raise CommandError("--dump writes graphs, and --enforce-eager makes none")
    job = InspectJob(
        model=existing(model),
        dtype=dtype,
        sites=split(sites or []),
        dump=str(_folder(dump)) if dump is not None else None,
        apps=tuple(str(path.absolute()) for path in app or ()),
        op_modules=tuple(op_module or ()),
        eager=eager,
    )
    stderr = Console(stderr=True)
    failure: CommandError | None = None
    with (
        step(stderr, f"Compiling {model}", quiet=True),
        engine(job, verbose) as process,
    ):
        try:
            found = process.result()
        except CommandError as error:
            failure, found = error, error.found
    if as_json:
        shown = found | ({"error": str(failure)} if failure else {})
        typer.echo(json.dumps(shown, indent=1))
    elif "sites" in found:
        _print(Console(), found, every)
        if dump is not None:
            Console().print(f"Graphs, diff and compiled code are in {dump}")
    if failure is not None:
        raise failure


def existing(model: str) -> str:
    """The model, if it is a model's folder or may be a name on a hub.

    Raises:
        CommandError: neither.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CommandError(f"no config.json in {model}: not a model's folder")
        return str(folder.resolve())
    if _HUB_NAME.fullmatch(model):
        return model
    raise CommandError(f"no such model folder: {model}")


def split(sites: list[str]) -> tuple[str, ...]:
    """Site names out of a repeated option with commas."""
    parts = (part.strip() for text in sites for part in text.split(","))
    return tuple(part for part in parts if part)


def _folder(dump: Path) -> Path:
    try:
        dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write to {dump}: {error.strerror}") from error
    return dump.resolve()


def _print(console: Console, found: dict[str, Any], every: bool) -> None:
    lines = tables.site_lines(found)
    console.print(tables.full_table(lines) if every else tables.short_table(lines))
    if not every:
        for note in tables.missing_notes(lines):
            console.print(
                f"Missing: {note}", style="red", markup=False, highlight=False
            )
    console.print(tables.count_note(found), highlight=False)
