"""`eyesplice serve`: vLLM's own server, switched on."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from eyesplice._errors import SpecError
from eyesplice.integration.cli.launch import require_engine

_SERVER: Final = "vllm.entrypoints.openai.api_server"
_OPTION: Final = "--additional-config"


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder or name.")],
    app: Annotated[
        list[Path] | None,
        typer.Option(help="Folder or file of an app. May be given several times."),
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="Folder of steering vectors.")
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(
            help="An app for requests that name none. May be given several times."
        ),
    ] = None,
    op_module: Annotated[
        list[str] | None,
        typer.Option(
            help="A module that registers ops of your own. May be given several times."
        ),
    ] = None,
) -> None:
    """Serve a model with vLLM's OpenAI server, eyesplice switched on.

    Every other option is `vllm serve`'s own, such as --port, --max-model-len or
    --additional-config, whose "eyesplice" object may hold further keys.
    """
    require_engine()
    modules = tuple(op_module or ())
    own = own_part(tuple(app or ()), vectors, tuple(default or ()), modules)
    command = server_command(model, own, list(context.args))
    os.execv(command[0], command)


def own_part(
    apps: Sequence[Path],
    vectors: Path | None,
    default: Sequence[str],
    op_modules: Sequence[str] = (),
) -> dict[str, Any]:
    """The configuration that the command's own options make."""
    own: dict[str, Any] = {}
    if apps:
        own["apps"] = [str(path.absolute()) for path in apps]
    if vectors is not None:
        own["vectors"] = str(vectors.absolute())
    if default:
        own["default"] = list(default)
    if op_modules:
        own["op_modules"] = list(op_modules)
    return own


def server_command(model: str, own: dict[str, Any], options: list[str]) -> list[str]:
    """The server's command line: `options` with eyesplice's part of the configuration.

    Args:
        model: a model folder or name.
        own: keys of the configuration, which replace those of --additional-config.
        options: of vLLM's server.

    Raises:
        SpecError: an `--additional-config` that is not a JSON object.
    """
    additional, rest = _take_additional(options)
    given = additional.setdefault("eyesplice", {})
    if own:
        if not isinstance(given, dict):
            raise SpecError(
                _OPTION, given, 'an object under "eyesplice"', "write {} there"
            )
        given.update(own)
    option = [_OPTION, json.dumps(additional)]
    return [sys.executable, "-m", _SERVER, "--model", model, *option, *rest]


def _take_additional(options: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The value of --additional-config, and the options without it."""
    rest: list[str] = []
    text = "{}"
    items = iter(options)
    for item in items:
        name, equals, value = item.partition("=")
        if name.replace("_", "-") == _OPTION:
            text = value if equals else next(items, "")
        else:
            rest.append(item)
    try:
        additional = json.loads(text)
    except ValueError:
        additional = None
    if not isinstance(additional, dict):
        raise SpecError(_OPTION, text, "a JSON object", "quote it for the shell")
    return additional, rest
