"""The field in one run: vanilla, enforce_eager, hotwire-vllm, vllm-lens and eyesplice.

All engines that start share the GPU and take turns. A decode step is the difference of
two calls of `LLM.generate`, long and short, over the tokens between them: every peer can
be driven that way. A peer that does not install, start or steer is reported with its
error and has no numbers.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.agreement import agreement
from eyesplice.benchmarks.bench import VANILLA, VECTOR_SIZE, Bench
from eyesplice.benchmarks.engines import EngineProcess
from eyesplice.benchmarks.intervals import against
from eyesplice.benchmarks.pairs import asking, cell, extra_args, write
from eyesplice.benchmarks.records import Refused

EYESPLICE: Final = "eyesplice"
_STRONG: Final = 10.0 / VECTOR_SIZE
_PROMPT: Final = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """A plugin that steers.

    Attributes:
        wheel: its name in the names of wheels.
        plugin: the name of its entry point.
        env: variables that its engine needs.
    """

    wheel: str
    plugin: str
    env: Mapping[str, str] = field(default_factory=dict)


PEERS: Final = {
    "hotwire": Peer("hotwire_vllm", "hotwire"),
    "vllm-lens": Peer("vllm_lens", "activations"),
}


def steering(name: str, vector: Path, layer: int, scale: float) -> dict[str, Any]:
    """`extra_args` of a request that adds one vector at one layer's output.

    Args:
        name: "eyesplice" or one of `PEERS`.
        vector: a safetensors file; its stem is the vector's name.
        layer: decoder layer.
        scale: factor of the vector.
    """
    match name:
        case "hotwire":
            entry = f'{{"id": "{vector.stem}", "layer": {layer}, "scale": {scale}}}'
            return {"hotwire": entry}
        case "vllm-lens":
            # Their vectors are objects: the engine's process makes them.
            return {"lens": {"file": str(vector), "layer": layer, "scale": scale}}
    found = extra_args(asking(write(vector.stem, layer, scale=scale)))
    assert found is not None
    return found


def run(bench: Bench, wheels: Path | None, batch: int, steps: int) -> dict[str, Any]:
    """Measure whoever starts and write the record.

    Args:
        bench: options.
        wheels: folder of the peers' wheels and of what they need; None leaves them out.
        batch: requests.
        steps: decode steps of a call.

    Raises:
        Refused: vanilla or eyesplice does not start, or idle texts are not vanilla's.
    """
    bench.close()
    layer = bench.shape().layers // 2
    with tempfile.TemporaryDirectory(prefix="eyesplice-peers-") as folder:
        engines, failed = _start(bench, wheels, Path(folder))
        try:
            vector = bench.vectors() / "v0.safetensors"
            checked = _check(engines, failed, vector, layer)
            cases = _cases(engines, vector, layer)
            results = _measure(bench, engines, cases, batch, steps)
        finally:
            for engine in engines.values():
                engine.close()
    record = {
        "check": checked,
        "failed": failed,
        "batch": batch,
        "steps": steps,
        "rounds": bench.rounds,
        "engines": {name: engine.ready for name, engine in engines.items()},
        "results": results,
    }
    bench.write("peers", record)
    print_peers(bench.console, record)
    return record


def _start(
    bench: Bench, wheels: Path | None, folder: Path
) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """The engines that serve, and why others do not."""
    started = {
        VANILLA: bench.start("peers-vanilla"),
        EYESPLICE: bench.start("peers-eyesplice", config={}),
        "enforce_eager": bench.start("peers-eager", enforce_eager=True),
    }
    failed: dict[str, str] = {}
    for name, peer in PEERS.items():
        try:
            env = _installed(peer, wheels, folder / name)
        except Refused as error:
            failed[name] = str(error)
            continue
        env |= {"VLLM_PLUGINS": peer.plugin, **peer.env}
        env["HOTWIRE_VECTORS"] = str(_torch_files(bench.vectors(), folder / "vectors"))
        started[name] = bench.start(f"peers-{name}", plugin=True, env=env)
    engines = {}
    for name, engine in started.items():
        try:
            engines[name] = engine.wait()
            bench.console.print(f"{name} serves after {engine.ready['seconds']:.0f} s")
        except RuntimeError as error:
            failed[name] = str(error)
            bench.console.print(f"{name} does not start")
    if missing := {VANILLA, EYESPLICE} - set(engines):
        for engine in engines.values():
            engine.close()
        name = min(missing)
        raise Refused(f"no numbers: {name} does not start: {failed[name]}")
    return engines, failed


def _installed(peer: Peer, wheels: Path | None, target: Path) -> dict[str, str]:
    """Install a peer from its wheels, beside nothing else, and say where it is."""
    found = sorted(wheels.glob("*.whl")) if wheels is not None else []
    others = {other.wheel for other in PEERS.values()} - {peer.wheel}
    chosen = [w for w in found if w.name.split("-")[0] not in others]
    if not any(w.name.startswith(f"{peer.wheel}-") for w in chosen):
        raise Refused(f"no wheel {peer.wheel}-*.whl in {wheels}")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    command += ["--target", str(target), *map(str, chosen)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{peer.wheel} does not install: {done.stderr.strip()[-500:]}")
    path = [str(target), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def _torch_files(vectors: Path, folder: Path) -> Path:
    """The first vector as hotwire reads it."""
    import torch
    from safetensors.torch import load_file

    folder.mkdir(exist_ok=True)
    (tensor,) = load_file(vectors / "v0.safetensors").values()
    torch.save(tensor, folder / "v0.pt")
    return folder


def _check(
    engines: dict[str, EngineProcess], failed: dict[str, str], vector: Path, layer: int
) -> dict[str, Any]:
    """Idle texts are vanilla's; a peer that does not steer is taken out."""
    rng = random.Random(4)
    prompts = [[rng.randrange(10, 500) for _ in range(48)] for _ in range(16)]
    plain = [None] * len(prompts)
    texts = {
        name: engine.generate(prompts, 16, plain, logprobs=0)
        for name, engine in engines.items()
    }
    pairs = {
        name: list(zip(answer["tokens"], answer["logprobs"], strict=True))
        for name, answer in texts.items()
    }
    agreed = agreement(pairs[VANILLA], pairs[EYESPLICE])
    for name in (EYESPLICE, *PEERS):
        if name not in engines:
            continue
        strong = steering(name, vector, layer, _STRONG)
        changed = engines[name].generate(prompts, 16, [strong] * len(prompts))
        if changed["tokens"] != texts[name]["tokens"]:
            continue
        if name == EYESPLICE:
            raise Refused("no numbers: a strong vector changed no text")
        failed[name] = "a strong vector changed no text"
        engines.pop(name).close()
    return agreed


def _cases(
    engines: Mapping[str, EngineProcess], vector: Path, layer: int
) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Case to engine and `extra_args`."""
    cases: dict[str, tuple[str, dict[str, Any] | None]] = {}
    for name in engines:
        if name in (EYESPLICE, *PEERS):
            cases[f"{name} idle"] = (name, None)
            cases[f"{name} steered"] = (name, steering(name, vector, layer, 1.0))
        else:
            cases[name] = (name, None)
    return cases


def _measure(
    bench: Bench,
    engines: Mapping[str, EngineProcess],
    cases: Mapping[str, tuple[str, dict[str, Any] | None]],
    batch: int,
    steps: int,
) -> dict[str, Any]:
    times: dict[str, list[float]] = {case: [] for case in cases}
    for number, case in bench.turns(cases):
        name, extra = cases[case]
        seconds = [
            engines[name].ask(
                "prefill",
                prompts=batch,
                prompt_tokens=_PROMPT,
                max_tokens=tokens,
                extra_args=extra,
                seed=number + 1,
            )["seconds"]
            for tokens in (1, steps + 1)
        ]
        if number >= 0:
            times[case].append((seconds[1] - seconds[0]) / steps)
    return compared(times)


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Median milliseconds of a step and the ratio to vanilla's, by case.

    Raises:
        Refused: a long call that took no longer than a short one.
    """
    if any(value <= 0 for of in times.values() for value in of):
        raise Refused("no numbers: a step has no time; raise --steps")
    return {
        case: {
            "ms": 1e3 * statistics.median(of),
            "all_ms": [1e3 * value for value in of],
            **against(of, times[VANILLA]),
        }
        for case, of in times.items()
    }


def print_peers(console: Console, record: Mapping[str, Any]) -> None:
    """A row for each case, and for each peer without numbers."""
    table = Table(title=f"decode step of {record['batch']} requests, one layer steered")
    table.add_column("engine")
    table.add_column("ms (to vanilla)", justify="right")
    for case, found in record["results"].items():
        table.add_row(case, cell(case, f"{found['ms']:.3f}", found))
    for name, error in record["failed"].items():
        table.add_row(name, error.strip().splitlines()[-1][:80])
    console.print(table)
