"""`eyesplice serve`: vLLM's own server, switched on."""

import json
import os
import sys
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
    vectors: Annotated[
        Path | None, typer.Option(help="Folder of steering vectors.")
    ] = None,
) -> None:
    """Serve a model with vLLM's OpenAI server, eyesplice switched on.

    Every other option is `vllm serve`'s own, such as --port, --max-model-len or
    --additional-config, whose "eyesplice" object may hold further keys.
    """
    require_engine()
    command = server_command(model, vectors, list(context.args))
    os.execv(command[0], command)


def server_command(model: str, vectors: Path | None, options: list[str]) -> list[str]:
    """The server's command line: `options` with eyesplice's part of the configuration.

    Raises:
        SpecError: an `--additional-config` that is not a JSON object.
    """
    additional, rest = _take_additional(options)
    ours = additional.setdefault("eyesplice", {})
    if vectors is not None:
        if not isinstance(ours, dict):
            raise SpecError(
                _OPTION, ours, 'an object under "eyesplice"', "write {} there"
            )
        ours["vectors"] = str(vectors.absolute())
    given = [_OPTION, json.dumps(additional)]
    return [sys.executable, "-m", _SERVER, "--model", model, *given, *rest]


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
