"""The entry point of the command line. Engines and torch load inside the commands."""

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eyesplice._errors import SpecError
from eyesplice._version import __version__
from eyesplice.integration.cli.demo import demo_command
from eyesplice.integration.cli.inspect import inspect_command
from eyesplice.integration.cli.launch import CommandError, engine_version
from eyesplice.integration.cli.serve import serve_command


class _Group(TyperGroup):
    """Tells an expected error in its own words and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SpecError, CommandError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Steer a model's activations inside vLLM, per request.",
)
app.command("demo")(demo_command)
app.command("inspect")(inspect_command)
app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve_command)


# By name: the benchmarks are the room above this one.
app.add_typer(importlib.import_module("eyesplice.benchmarks.cli").app, name="bench")


@app.command("version")
def version_command() -> None:
    """Print the versions of eyesplice, vLLM and Python."""
    python = sys.version.split()[0]
    engine = engine_version() or "vLLM is not installed"
    typer.echo(f"eyesplice {__version__} ({engine}, Python {python})")


def _print_version(wanted: bool) -> None:
    if wanted:
        version_command()
        raise typer.Exit(0)


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions and exit.",
        ),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
