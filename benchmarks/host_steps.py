"""What eyesplice costs the host at each step: a runner's calls, without a model or a GPU.

    python benchmarks/host_steps.py [--steps 200] [--out FILE]

Steps of decoding of 1, 64 and 256 requests go through what runs in the worker before and
after the forward pass (`step`), when the step's output is handled (`join`), and in the
engine core (`core`), with the kernels left out. Each number is the median of the steps, in
microseconds. `pickle` is what a worker in a process of its own adds.
"""

import argparse
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import (
    CaptureInfo,
    Clause,
    Entry,
    FunctionInfo,
    Program,
    ScoreInfo,
)
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site, Table
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.results import Results
from eyesplice.integration.router import Router
from eyesplice.integration.scheduler_hook import CoreAnswers
from eyesplice.ops import contracts
from eyesplice.ops.layout import ClauseKind, Opcode, Scope, Stage

LAYERS: Final = 32
PROMPT: Final = 50
ROOM: Final = 256
SUBMODULE: Final = "residual.mid"
KINDS: Final = ("idle", "write", "read", "capture")
"""One vector at every layer; the same and a probe whose mean a gate wants; the same and
captures of the last prompt token at every layer."""


@dataclass(frozen=True)
class Case:
    """One row of the result.

    `changing` tells whether a request ends and another begins at every step.
    """

    kind: str
    requests: int
    changing: bool
    step: list[float] = field(default_factory=list)
    join: list[float] = field(default_factory=list)
    pickle: list[float] = field(default_factory=list)
    core: list[float] = field(default_factory=list)


def program(number: int, kind: str) -> Program:
    """A program of its own for each request."""
    common: dict[str, Any] = {"stage": Stage.STREAM, "clause_mask": 1}
    add = Entry(opcode=Opcode.ADD, u=1, gain=1.0, counter=1, bit=1, **common)
    sites = [Site(layer, SUBMODULE) for layer in range(LAYERS)]
    tables: dict[Table, tuple[Entry, ...]] = {s.table[0]: (add,) for s in sites}
    layers = tuple(range(LAYERS))
    names = {"write": "steering_vector", "read": "probe"}
    functions = [
        FunctionInfo(
            name=name,
            kind="write" if name == "write" else "read",
            kernel=names.get(name, name),
            layers=layers,
            submodule=SUBMODULE,
        )
        for name in dict.fromkeys(["write", kind])
    ]
    more: dict[str, Any] = {}
    if kind == "read":
        more["scores"] = (ScoreInfo(1, 0, None, Scope.REQUEST),)
    if kind == "capture":
        more["captures"] = tuple(CaptureInfo(1, site) for site in sites)
        for index, site in enumerate(sites):
            capture = Entry(opcode=Opcode.CAPTURE, u=index, **common)
            tables[site.table[0]] = (capture, add)
    when = ClauseKind.LAST if kind == "capture" else ClauseKind.ALL
    digest = f"sha256:{number}"
    return Program(digest, (Clause(when),), tables, tuple(functions), **more)


class World:
    """The tables of the 8B shape, narrow ones, and requests that decode."""

    def __init__(self) -> None:
        sites = {Site(n, name) for n in range(LAYERS) for name in BOUNDARY_SUBMODULES}
        plan = SplicePlan("layers", LAYERS, frozenset(sites))
        sizes = BufferSizes(
            tokens=8192, requests=ROOM, entries=8, bank_rows=2, width=64
        )
        buffers = Buffers.allocate(
            plan, sizes, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        self.results = Results(buffers, {SUBMODULE: 64})
        self.router = Router(buffers, self.results)
        self.core = CoreAnswers()
        self.requests: dict[str, Any] = {}

    def begin(self, name: str, what: Program) -> None:
        """A request past its prompt."""
        params = SimpleNamespace(stop=[], extra_args={"eyesplice": "{}"})
        self.requests[name] = SimpleNamespace(
            sampling_params=params, is_finished=lambda: False
        )
        self.router.begin(name, what, PROMPT, 2 * PROMPT)


def measure(case: Case, steps: int) -> Case:
    """Time `steps` steps of the case, after some that are not counted."""
    world, count = World(), case.requests
    programs = [program(number, case.kind) for number in range(count)]
    names = [f"cmpl-{number:032d}-0" for number in range(count)]
    active = case.kind != "idle"
    for name, what in zip(names, programs, strict=True):
        if active:
            world.begin(name, what)
    starts = torch.arange(count + 1, dtype=torch.int32)
    positions = torch.full((count,), 2 * PROMPT)
    lengths = np.ones(count, dtype=np.int32)
    for number in range(-10, steps):
        place = number % count
        if case.changing:
            world.router.end(names[place])
            del world.requests[names[place]]
            names[place] = f"next-{number:032d}-0"
        began = time.perf_counter()
        if case.changing:
            world.begin(names[place], programs[place])
        world.router.step(names, starts, positions, positions, count, lengths)
        step = world.router.take_step()
        pending = None if step is None else world.results.launch(step)
        times = [time.perf_counter() - began]
        if pending is not None:
            times += _handle(world, names, pending.join)
        if number >= 0:
            for into, spent in zip(
                (case.step, case.join, case.pickle, case.core), times, strict=False
            ):
                into.append(1e6 * spent)
    return case


def _handle(world: World, names: list[str], join: Callable[[], Any]) -> list[float]:
    outputs = [SimpleNamespace(request_id=name, finish_reason=None) for name in names]
    marks = [time.perf_counter()]
    answer = join()
    marks.append(time.perf_counter())
    pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    marks.append(time.perf_counter())
    world.core.add(answer, world.requests)
    world.core.send(outputs, answer)
    marks.append(time.perf_counter())
    return [float(spent) for spent in np.diff(marks)]


def _median(values: list[float]) -> float | None:
    return round(float(np.median(values)), 1) if values else None


def main() -> None:
    """Measure every case and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("route_", "collect_"):
        setattr(contracts, name, lambda *_: None)
    rows = []
    for kind in KINDS:
        for requests in (1, 64, ROOM):
            for changing in (False, True) if kind != "idle" else (False,):
                case = measure(Case(kind, requests, changing), options.steps)
                row = asdict(case)
                for part in ("step", "join", "pickle", "core"):
                    row[part] = _median(row[part])
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
