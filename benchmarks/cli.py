"""`eyesplice bench`: every case a command; several may follow one another."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyesplice.benchmarks import cli_steps
from eyesplice.benchmarks.case_chain import CaseChain
from eyesplice.benchmarks.cli_options import (
    SHARED,
    Batches,
    arguments,
    bench_of,
    numbers,
    refusals,
)
from eyesplice.integration.cli.launch import CommandError

app = typer.Typer(
    cls=CaseChain,
    subcommand_metavar="CASE [OPTIONS] [CASE [OPTIONS]]...",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""\
Benchmarks against vanilla vLLM, paired in one run.

Each CASE writes JSON with machine and versions, prints medians and ratios with 95%
intervals, and prints no number when the check before it fails. Options that all cases
share stand before the first CASE: `eyesplice bench --model FOLDER layers memory`.
Cases of one chain share a pair of engines; its start takes about 110 s on an H200, cold.
""",
)


@app.callback()
def _shared(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A model folder; with the load format dummy config.json is enough."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of JSON files and logs.")] = Path(
        "bench"
    ),
    load_format: Annotated[str, typer.Option(help="vLLM's: dummy, auto.")] = "dummy",
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Counted rounds, paired; memory, trace, host and startup have none.",
        ),
    ] = 7,
    engine: Annotated[
        str, typer.Option(help="A JSON object: further arguments of vllm.LLM.")
    ] = "{}",
) -> None:
    from eyesplice.benchmarks.bench import Bench

    with refusals(engine=False):
        bench = Bench(
            model=model,
            out=out,
            load_format=load_format,
            rounds=rounds,
            engine=arguments(engine),
            console=Console(width=140),
        )
    context.find_root().meta[SHARED] = bench
    context.call_on_close(bench.close)


@app.command("serve")
def serve_command(
    context: typer.Context,
    dataset: Annotated[Path, typer.Option(help="A ShareGPT file, also one cut off.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer of a model that has none."),
    ] = None,
    rows: Annotated[
        str,
        typer.Option(
            help="Comma-separated: idle, names of packs, all (every pack in one "
            "request); every row by default."
        ),
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 250,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer.")
    ] = 128,
    rate: Annotated[float, typer.Option(help="Requests per second, Poisson.")] = 10.0,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keep so many decoder layers, for two servers to fit."
        ),
    ] = None,
    cache_gib: Annotated[float, typer.Option(help="KV cache of each server.")] = 16.0,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks of each server.")
    ] = 1,
    wait: Annotated[float, typer.Option(help="Seconds that a start may take.")] = 600.0,
    server_options: Annotated[
        str, typer.Option(help="Further options of both servers, as in a shell.")
    ] = "",
) -> None:
    """vLLM's own `vllm bench serve`, seven apps on one server, vanilla on another.

    It takes one start (about 110 s on an H200, cold, both servers at once), 3 s per row to
    check and warm up, and (2 + ROUNDS x (1 + rows)) x (PROMPTS / RATE + 2) seconds, since
    each server first serves a run that does not count. Rows of later calls are merged into
    the same file, each naming its sitting.
    """
    import shlex

    from eyesplice.benchmarks import serve

    bench = bench_of(context)
    settings = serve.Settings(
        model=bench.require_model(),
        dataset=dataset,
        tokenizer=tokenizer,
        rows=tuple(filter(None, rows.split(","))),
        prompts=prompts,
        output_tokens=output_tokens,
        rate=rate,
        runs=bench.rounds,
        layers=layers,
        load_format=bench.load_format,
        cache_bytes=int(cache_gib * 2**30),
        tensor_parallel=tensor_parallel,
        wait=wait,
        server_options=tuple(shlex.split(server_options)),
    )
    with refusals():
        bench.close()
        record = serve.run(settings, bench.out, bench.console)
        serve.print_record(record, bench.console)


@app.command("kernel")
def kernel_command(
    context: typer.Context,
    options: Annotated[
        str, typer.Option(help="Of the script, as in a shell: '--hidden 4096 --sweep'.")
    ] = "",
) -> None:
    """One boundary and its GEMM in a CUDA graph, against Inductor's fused norm.

    It needs a GPU and no model. On an H200 about 0.5 s for each of 32 cells, and 60 s for
    compilers; it is refused where an output is not within its bound of float64.
    """
    import shlex
    import subprocess
    import sys

    with refusals():
        bench = bench_of(context)
        bench.out.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("kernel.py")
        target = ["--out", str(bench.out / "kernel.json")]
        command = [sys.executable, str(script), *target, *shlex.split(options)]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise CommandError(
                f"the kernel benchmark ended with code {done.returncode}"
            )


cli_steps.add_to(app)


@app.command("trace")
def trace_command(context: typer.Context, batches: Batches = "1,64") -> None:
    """The kernels of one decode step, vanilla's beside an idle and an active engine's.

    On an H200, 8B shape: about 3 s per case and batch, and a start.
    """
    from eyesplice.benchmarks import trace

    with refusals():
        trace.run(bench_of(context), numbers(batches))


@app.command("memory")
def memory_command(context: typer.Context) -> None:
    """Device memory of each table, and of the whole engine over vanilla's.

    It costs a start, nothing behind another case.
    """
    from eyesplice.benchmarks import memory

    with refusals():
        memory.run(bench_of(context))


@app.command("startup")
def startup_command(
    context: typer.Context,
    starts: Annotated[
        int, typer.Option(min=1, help="Cold and warm starts of each.")
    ] = 1,
) -> None:
    """Seconds of compilation and start, cold and warm, each with its own caches.

    Four starts one after another for each of STARTS: on an H200, 8B shape, about 90 s cold
    and 45 s warm, so 270 s.
    """
    from eyesplice.benchmarks import startup

    with refusals():
        startup.run(bench_of(context), starts)


@app.command("host")
def host_command(
    context: typer.Context,
    batches: Batches = "1,64,256",
    steps: Annotated[
        int, typer.Option(min=1, help="Decode steps that are timed.")
    ] = 100,
) -> None:
    """Host code per step, its launches and its copies, idle and active.

    On a CPU launches are not counted, and the work of what is launched is in the time.
    It costs a start of its own (hooks are timed), and about 2 s per batch and case.
    """
    from eyesplice.benchmarks import host

    with refusals():
        host.run(bench_of(context), numbers(batches), steps)


@app.command("capture")
def capture_command(
    context: typer.Context,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a run.")] = 128,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt.")
    ] = 512,
    every: Annotated[
        int, typer.Option(min=1, help="Prompts of a run that captures every token.")
    ] = 16,
) -> None:
    """Capture of the last prompt token at all layers, and of every token.

    It costs a start of its own (a ring of 1 GiB on the 8B shape), then on an H200 about
    2 s per case and round for the last token and 1 to 5 s for every token: 80 s.
    """
    from eyesplice.benchmarks import capture

    with refusals():
        capture.run(bench_of(context), prompts, prompt_tokens, every)


@app.command("peers")
def peers_command(
    context: typer.Context,
    wheels: Annotated[
        Path | None,
        typer.Option(
            help="Folder of wheels: hotwire_vllm, vllm_lens and what they need."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests of the batch.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a call.")] = 64,
) -> None:
    """Idle and one layer steered, beside hotwire-vllm, vllm-lens and enforce_eager.

    Five engines start at once: on an H200, 8B shape, with 4 GiB of KV cache each
    (--engine '{"kv_cache_memory_bytes": 4294967296}'), about 180 s; then about 1 s per
    case and round, more for engines without CUDA graphs: 80 s.
    """
    from eyesplice.benchmarks import peers

    with refusals():
        peers.run(bench_of(context), wheels, batch, steps)


@app.command("plots")
def plots_command(
    context: typer.Context,
    results: Annotated[Path, typer.Option(help="Folder of JSON files.")] = Path(
        "benchmarks/results/h200"
    ),
    page: Annotated[
        Path, typer.Option(help="The page whose tables are filled.")
    ] = Path("docs/performance.md"),
) -> None:
    """Tables and SVG pictures of a page, from the JSON of earlier runs; no engine."""
    from eyesplice.benchmarks import plots

    with refusals(engine=False):
        plots.run(results, page, bench_of(context).console)
