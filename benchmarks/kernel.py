"""Time of a boundary inside a chain of GEMMs, against Inductor's fused add + RMSNorm.

    python benchmarks/kernel.py --out kernel.json [--sweep]

One CUDA graph holds 32 x (boundary, hidden x hidden GEMM), as decoder layers would. Four
graphs (Inductor, idle, 1 vector, 4 vectors at every token) are replayed in turn, and the
medians are compared. Nothing is timed before the outputs agree with float64.
"""

import argparse
import json
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eyesplice.ops import launch
from eyesplice.ops.inputs import Entry, pack_programs
from eyesplice.ops.launch import Launch
from eyesplice.ops.layout import Family, Opcode, Stage
from eyesplice.ops.token_map import words_of
from eyesplice.ops.tolerances import ROUNDING, error_bound
from eyesplice.ops.work import empty_work

BOUNDARIES: Final = 32
TOKENS: Final = (1, 8, 16, 64, 256, 1024, 2048, 8192)
HIDDEN: Final = (576, 1536, 4096, 8192)
VECTORS: Final = (0, 1, 4)
EPS: Final = 1e-5
FAMILIES: Final = Family.ADD | Family.RANK1 | Family.READ | Family.GATE | Family.CAPTURE
"""What a deployment compiles in by default."""

CELL_SECONDS: Final = 0.3
MAX_REPLAYS: Final = 60
DTYPE: Final = torch.bfloat16

SWEEP: Final = tuple(
    Launch(0, registers, simple, ahead, early)
    for registers, simple, ahead in (
        (None, True, True),
        (64, True, True),
        (64, False, True),
        (64, False, False),
        (40, False, False),
    )
    for early in (False, True)
)
"""Launches of a sweep; their warps are those of `choose_launch`, which fix the bits."""

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(branch, stream) -> (normed, stream)`."""


@dataclass(frozen=True)
class Inputs:
    """Values, weights and tables of one size.

    `programs[n]` adds n vectors to h, `maps[n]` gives it to every token.
    """

    stream: Tensor
    branch: Tensor
    weight: Tensor
    gemms: Tensor
    maps: dict[int, Tensor]
    select: Tensor
    programs: dict[int, Tensor]
    bank: Tensor
    work: list[Tensor]


@dataclass(frozen=True)
class Chain:
    """A captured chain, and the tensors that its replays use."""

    graph: torch.cuda.CUDAGraph
    step: Step
    stream: Tensor


def inductor_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """vLLM's formula of the fused add and RMSNorm, with its casts."""
    total = x.float() + residual.float()
    variance = total.pow(2).mean(dim=-1, keepdim=True)
    normed = total * torch.rsqrt(variance + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


def make_inputs(num_tokens: int, hidden_size: int, gemms: Tensor) -> Inputs:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DTYPE, device="cuda")

    programs = {
        n: pack_programs(
            [[Entry(Opcode.ADD, Stage.STREAM, 1 + i, gain=0.1) for i in range(n)]], 8
        ).cuda()
        for n in VECTORS
    }
    rows = select = torch.ones(num_tokens, dtype=torch.int32, device="cuda")
    return Inputs(
        stream=normal(num_tokens, hidden_size),
        branch=normal(num_tokens, hidden_size),
        weight=1 + 0.1 * normal(hidden_size),
        gemms=gemms,
        maps={n: words_of(p[None], rows, select)[0] for n, p in programs.items()},
        select=select,
        programs=programs,
        bank=normal(64, hidden_size),
        work=list(empty_work(num_tokens, 2, 32, 2, hidden_size, DTYPE, "cuda")),
    )


def splice_step(
    inputs: Inputs,
    vectors: int,
    chosen: Launch | None = None,
    *,
    round_before_weight: bool = False,
) -> Step:
    def step(branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        normed = launch.boundary_(
            stream,
            branch,
            inputs.weight,
            0.0,
            EPS,
            inputs.maps[vectors],
            inputs.select,
            inputs.programs[vectors],
            inputs.bank,
            inputs.work,
            int(FAMILIES),
            round_before_weight=round_before_weight,
            launch=chosen,
        )
        return normed, stream

    return step


def inductor_step(inputs: Inputs, compiled: Any) -> Step:
    return lambda branch, stream: compiled(branch, stream, inputs.weight, EPS)


def compile_norm(hidden_size: int) -> Any:
    """One kernel for every batch size, compiled at the largest, as vLLM does."""
    torch._dynamo.reset()
    compiled = torch.compile(inductor_norm, fullgraph=True)
    x = torch.zeros(max(TOKENS), hidden_size, dtype=DTYPE, device="cuda")
    residual, weight = torch.zeros_like(x), torch.zeros_like(x[0])
    for tensor in (x, residual):
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled(x, residual, weight, EPS)
    return compiled


def check(inputs: Inputs) -> float:
    """The largest error over its bound; raises if any is over 1."""
    worst = 0.0
    for vectors in VECTORS:
        stream = inputs.stream.clone()
        normed, stream = splice_step(inputs, vectors)(inputs.branch, stream)
        added = 0.1 * inputs.bank[1 : 1 + vectors].double()
        h = inputs.stream.double() + inputs.branch.double() + added.sum(0)
        size = inputs.stream.abs().double() + inputs.branch.abs() + added.abs().sum(0)
        scale = (
            h.square().mean(-1, keepdim=True) + EPS
        ).rsqrt() * inputs.weight.double()
        for result, exact, about in (
            (stream, h, size),
            (normed, h * scale, 3 * size * scale.abs()),
        ):
            bound = error_bound(exact, about, exact, rounding=ROUNDING[DTYPE])
            over = ((result.double() - exact).abs() / bound).max()
            worst = max(worst, float(over.nan_to_num(nan=torch.inf)))
    if worst > 1:
        raise AssertionError(f"error is {worst:.2f} times its bound")
    return worst


def equal_bits(inputs: Inputs, compiled: Any) -> dict[str, float]:
    """Share of idle outputs that have exactly the bits of Inductor's."""
    expected, total = inductor_step(inputs, compiled)(
        inputs.branch, inputs.stream.clone()
    )
    shares = {"stream": 0.0}
    for rounded in (False, True):
        step = splice_step(inputs, 0, round_before_weight=rounded)
        normed, stream = step(inputs.branch, inputs.stream.clone())
        shares[f"normed, rounded={rounded}"] = _share(normed, expected)
        shares["stream"] = _share(stream, total)
    return shares


def _share(a: Tensor, b: Tensor) -> float:
    return float((a.view(torch.int16) == b.view(torch.int16)).double().mean())


def capture(inputs: Inputs, step: Step) -> Chain:
    first = inputs.stream.clone()

    def chain() -> None:
        branch, stream = inputs.branch, first
        for gemm in inputs.gemms:
            normed, stream = step(branch, stream)
            branch = normed @ gemm

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return Chain(graph, step, first)


def time_in_turn(chains: Sequence[Chain], seconds: float) -> list[float]:
    """Median microseconds of one boundary and its GEMM, by chain.

    The order of the replays rotates, so that drift cancels.
    """

    def once(chain: Chain) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        chain.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / BOUNDARIES

    warm = [once(chain) for _ in range(3) for chain in chains]
    one_round = len(chains) * min(warm) * BOUNDARIES / 1e6
    times: list[list[float]] = [[] for _ in chains]
    for i in range(min(max(int(seconds / one_round), 15), MAX_REPLAYS)):
        for j in range(len(chains)):
            at = (i + j) % len(chains)
            times[at].append(once(chains[at]))
    return [statistics.median(of) for of in times]


def measure(inputs: Inputs, compiled: Any) -> dict[str, float]:
    """Median microseconds of one boundary and its GEMM."""
    names = ["inductor", *(f"vectors {n}" for n in VECTORS)]
    steps = [
        inductor_step(inputs, compiled),
        *(splice_step(inputs, n) for n in VECTORS),
    ]
    times = time_in_turn([capture(inputs, step) for step in steps], CELL_SECONDS)
    return dict(zip(names, times, strict=True))


def sweep(inputs: Inputs, compiled: Any) -> list[dict[str, Any]]:
    """Microseconds over Inductor's for every launch of `SWEEP`, idle and active."""
    num_tokens, hidden_size = inputs.stream.shape
    warps = launch.choose_launch(hidden_size, num_tokens, max(TOKENS)).warps
    some = [
        (chosen._replace(warps=warps), vectors)
        for chosen in SWEEP
        for vectors in VECTORS
    ]
    steps = [inductor_step(inputs, compiled)]
    steps += [splice_step(inputs, vectors, chosen) for chosen, vectors in some]
    chains = [capture(inputs, step) for step in steps]
    base, *rest = time_in_turn(chains, 4 * CELL_SECONDS)
    return [
        {**chosen._asdict(), "vectors": vectors, "us": us - base}
        for (chosen, vectors), us in zip(some, rest, strict=True)
    ]


def run_cell(
    inputs: Inputs, compiled: Any, with_sweep: bool, cell: dict[str, Any]
) -> None:
    cell["error_over_bound"] = check(inputs)
    cell["equal_bits"] = equal_bits(inputs, compiled)
    cell["us"] = measure(inputs, compiled)
    if with_sweep:
        cell["sweep"] = sweep(inputs, compiled)


def run_hidden(
    hidden_size: int, tokens: Sequence[int], with_sweep: bool
) -> list[dict[str, Any]]:
    """Every batch size of one width; a failure is a cell's result, not the end."""
    cells: list[dict[str, Any]] = []
    compiled = gemms = None
    for num_tokens in tokens:
        cell: dict[str, Any] = {"tokens": num_tokens, "hidden": hidden_size}
        cells.append(cell)
        try:
            compiled = compiled or compile_norm(hidden_size)
            if gemms is None:
                shape = (BOUNDARIES, hidden_size, hidden_size)
                gemms = torch.randn(shape, dtype=DTYPE, device="cuda")
                gemms *= hidden_size**-0.5
            inputs = make_inputs(num_tokens, hidden_size, gemms)
            run_cell(inputs, compiled, with_sweep, cell)
        except Exception as error:
            cell["failed"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return cells


def show(console: Console, cells: Sequence[dict[str, Any]]) -> None:
    table = Table(title="A boundary and its GEMM, us over Inductor's (ratio)")
    columns = ("hidden", "tokens", "Inductor us", "idle", "1 vector", "4 vectors")
    for column in (*columns, "equal bits: h", "y", "y rounded"):
        table.add_column(column, justify="right")
    for cell in cells:
        size = [str(cell["hidden"]), str(cell["tokens"])]
        if "failed" in cell:
            table.add_row(*size, cell["failed"].splitlines()[0][:40])
            continue
        base = cell["us"]["inductor"]
        over = [cell["us"][f"vectors {n}"] for n in VECTORS]
        table.add_row(
            *size,
            f"{base:.2f}",
            *(f"{us - base:+.2f} ({us / base:.3f})" for us in over),
            *(f"{share:.5f}" for share in cell["equal_bits"].values()),
        )
    console.print(table)
    for cell in cells:
        for found in cell.get("sweep", []):
            console.print(cell["hidden"], cell["tokens"], found)


def machine() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="time other launches too")
    return parser.parse_args()


def main() -> int:
    args = parse()
    console = Console(width=140)
    cells = []
    for hidden_size in args.hidden:
        cells += run_hidden(hidden_size, args.tokens, args.sweep)
        torch.cuda.empty_cache()
    args.out.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1))
    show(console, cells)
    return int(any("failed" in cell for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
