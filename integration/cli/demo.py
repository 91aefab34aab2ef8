"""`eyesplice demo`: a small real model, steered four ways in one batch, and the proof."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eyesplice.integration.cli import tables
from eyesplice.integration.cli.inspect import existing
from eyesplice.integration.cli.jobs import GenerateJob
from eyesplice.integration.cli.launch import (
    CommandError,
    engine,
    is_cpu_engine,
    require_engine,
)
from eyesplice.integration.cli.proof import Proof, compare
from eyesplice.integration.cli.steps import step

_WIDEST = 120


@dataclass(frozen=True, slots=True)
class Variant:
    """One request of the demo's batch; `request` None is the plain one."""

    name: str
    request: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo asks: one prompt, and how each request steers it."""

    prompt: str
    chat: bool
    variants: tuple[Variant, ...]


def demo_command(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="A folder of SmolLM2-135M-Instruct. Default: fetched once (93 MB).",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=256, help="Tokens per text.")
    ] = 48,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the engines' logs.")
    ] = False,
) -> None:
    """Steer a small real model, each request its own way, in one batch.

    Serves one prompt four times at once: plain, with a sentiment direction added and
    subtracted, and with it ablated. Then has vLLM without eyesplice serve it too, in a
    process of its own, and fails unless the plain text is the same token by token (in
    float32, on a CPU) or parts at a near tie (in bfloat16, on a GPU).
    """
    require_engine()
    stderr = Console(stderr=True)
    folder = existing(str(model)) if model is not None else _fetched(stderr)
    plan = read_plan(json.loads((files(_assets()) / "sentiment.json").read_text()))
    with as_file(files(_assets())) as vectors:
        ours = GenerateJob(
            model=folder,
            prompt=plan.prompt,
            chat=plan.chat,
            requests=tuple(variant.request for variant in plan.variants),
            max_tokens=max_tokens,
            vectors=str(vectors),
        )
        spliced, vanilla = _both(ours, stderr, verbose)
    proof = compare(spliced["outputs"][0], vanilla["outputs"][0])
    _print(Console(), plan, spliced, proof)
    if vanilla["spliced"] or not spliced["spliced"]:
        raise CommandError(
            "the two engines were not one with and one without eyesplice"
        )
    exact = spliced["dtype"] == "float32"
    if not (proof.same if exact else proof.same_up_to_rounding):
        raise CommandError("the plain request did not get what vLLM alone says")


def read_plan(passport: Mapping[str, Any]) -> Plan:
    """The plan in the passport of the sentiment direction."""
    demo = passport["demo"]
    vector, place = demo["vector"], {"submodule": demo["submodule"]}
    variants = [Variant("plain", None)]
    for scale in demo["scales"]:
        write = {"vector": vector, "layers": [demo["layer"]], **place, "scale": scale}
        variants.append(Variant(f"{vector} {scale:+g}", {"writes": [write]}))
    write = {"write": "ablate", "vector": vector, **demo["ablate"]}
    variants.append(Variant(f"{vector} ablated", {"writes": [write]}))
    return Plan(demo["prompt"], bool(demo["chat_template"]), tuple(variants))


def texts_table(plan: Plan, outputs: list[Mapping[str, Any]], width: int) -> Table:
    """The texts side by side, one column per request, within `width` characters."""
    table = Table(width=min(width, _WIDEST), header_style="bold", padding=(0, 1))
    for variant in plan.variants:
        table.add_column(variant.name, ratio=1, overflow="fold")
    table.add_row(*(escape(output["text"].strip()) for output in outputs))
    return table


def proof_lines(proof: Proof) -> list[str]:
    """The proof in words."""
    verdict = "the same" if proof.same else "NOT the same"
    if not proof.same and proof.same_up_to_rounding:
        verdict = "the same but for rounding, at a near tie"
    return [
        f"The plain text and that of vLLM without eyesplice are {verdict}:",
        f"  tokens equal: {proof.equal_tokens} of {proof.num_tokens}",
        f"  log-probabilities of the tokens: max |difference| {proof.max_difference:.2g}",
    ]


def _assets() -> str:
    return "eyesplice.integration.assets"


def _fetched(stderr: Console) -> str:
    from eyesplice.integration.model_fetch import fetch_smollm2

    def say(message: str) -> None:
        stderr.print(message, style="dim", highlight=False)

    with step(stderr, "Fetching the model", quiet=True):
        return str(fetch_smollm2(progress=say))


def _both(
    ours: GenerateJob, stderr: Console, verbose: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both engines say: side by side on a CPU, one after the other on a GPU."""
    theirs = GenerateJob(
        model=ours.model,
        prompt=ours.prompt,
        chat=ours.chat,
        # As many requests, so that both engines compute in the same shapes.
        requests=(None,) * len(ours.requests),
        max_tokens=ours.max_tokens,
        vectors=None,
    )
    with ExitStack() as stack:
        if is_cpu_engine():
            stack.enter_context(
                step(stderr, "Starting vLLM with and without eyesplice")
            )
            running = [
                stack.enter_context(engine(job, verbose, 2)) for job in (ours, theirs)
            ]
            return running[0].result(), running[1].result()
        stack.enter_context(step(stderr, "Starting vLLM with eyesplice"))
        spliced = stack.enter_context(engine(ours, verbose)).result()
    with step(stderr, "Starting vLLM without"), engine(theirs, verbose) as process:
        return spliced, process.result()


def _print(
    console: Console, plan: Plan, spliced: Mapping[str, Any], proof: Proof
) -> None:
    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False)

    line(
        f'\nOne batch on {spliced["device"]}, {spliced["dtype"]}. Prompt: "{plan.prompt}"'
    )
    console.print(texts_table(plan, spliced["outputs"], console.width))
    line(f'"{plan.variants[1].name}" is that request with one field, extra_args =')
    line("  " + json.dumps({"eyesplice": plan.variants[1].request}) + "\n", "cyan")
    found = spliced["table"]
    line(tables.count_note(found) + ":")
    console.print(tables.short_table(tables.site_lines(found)))
    line()
    for text in proof_lines(proof):
        line(text, "green" if proof.same else "red")
