"""The cases of `eyesplice bench` that time the steps of a pair of engines."""

from typing import Annotated

import typer

from eyesplice.benchmarks.cli_options import Batches, Steps, bench_of, numbers, refusals


def decode_command(
    context: typer.Context, batches: Batches = "1,8,64,256", steps: Steps = 96
) -> None:
    """Decode step: vanilla, idle, and vectors at one layer and at every boundary.

    On an H200, 8B shape: 0.7 s per case, round and batch (1.3 s at batch 256); with the
    defaults 120 s and a start.
    """
    from eyesplice.benchmarks import decode

    with refusals():
        decode.run(bench_of(context), numbers(batches), steps)


def configs_command(
    context: typer.Context,
    batch: Annotated[int, typer.Option(min=1, help="Requests of the batch.")] = 256,
    steps: Steps = 96,
    programs: Annotated[
        str,
        typer.Option(
            help="Numbers of distinct programs, comma-separated; none above BATCH."
        ),
    ] = "1,16,64,256",
) -> None:
    """0 to 256 distinct programs in one batch, at one layer and at all.

    On an H200, Qwen2-1.5B shape: about 1.2 s per case and round, so 100 s and a start.
    """
    from eyesplice.benchmarks import configs

    with refusals():
        configs.run(bench_of(context), batch, steps, numbers(programs))


def layers_command(
    context: typer.Context, batches: Batches = "8,256", steps: Steps = 96
) -> None:
    """One vector at 1, 4, 16 and all layers.

    On an H200, 8B shape: 0.7 s per case and round (1.3 s at batch 256), so 90 s with the
    defaults, and a start.
    """
    from eyesplice.benchmarks import layers

    with refusals():
        layers.run(bench_of(context), numbers(batches), steps)


def prompts_command(
    context: typer.Context,
    sizes: Annotated[
        str, typer.Option(help="Tokens of the prompts, comma-separated.")
    ] = "256,768,1024,1536",
    batch: Annotated[
        int, typer.Option(min=1, help="Requests that decode meanwhile.")
    ] = 32,
    cycles: Annotated[int, typer.Option(min=1, help="Prompts of a run.")] = 12,
) -> None:
    """Steps that hold a prompt beside requests that decode, and the steps after it.

    vLLM has CUDA graphs for steps of up to 512 tokens, unless told otherwise. On an H200,
    8B shape: about 1 s per case, round and size, so 160 s with the defaults, and a start.
    """
    from eyesplice.benchmarks import prompts

    with refusals():
        prompts.run(bench_of(context), numbers(sizes), batch, cycles)


def add_to(app: typer.Typer) -> None:
    """Make commands of the cases."""
    app.command("decode")(decode_command)
    app.command("configs")(configs_command)
    app.command("layers")(layers_command)
    app.command("prompts")(prompts_command)
