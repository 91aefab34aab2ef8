"""Programs of requests at random, and what each does to a token of a model of two sites."""

from dataclasses import dataclass
from typing import Any

import torch

from eyesplice.fx_passes.program import (
    CaptureInfo,
    Clause,
    Entry,
    FunctionInfo,
    Program,
    ScoreInfo,
)
from eyesplice.fx_passes.sites import Site
from eyesplice.ops.layout import (
    ClauseKind,
    Comparison,
    Opcode,
    Reduce,
    Scope,
    Score,
    Stage,
)

WIDTH = 8
SITES = Site(0, "residual.mid"), Site(1, "residual.mid")
WHEN = {
    ClauseKind.ALL: lambda p, n: True,
    ClauseKind.PROMPT: lambda p, n: p < n,
    ClauseKind.LAST: lambda p, n: p == n - 1,
    ClauseKind.GENERATED: lambda p, n: p >= n,
}
VECTOR = torch.arange(WIDTH) / 8 + 0.25


def value(layer: int, token: int, position: int) -> torch.Tensor:
    at = torch.arange(WIDTH, dtype=torch.float32)
    return torch.sin(0.37 * token + 0.7 * position + at + layer)


def score(layer: int, token: int, position: int) -> float:
    return float(value(layer, token, position) @ VECTOR)


@dataclass(frozen=True)
class Kind:
    """A program: under `when` it reads, captures or adds; perhaps gated by a mean."""

    when: ClauseKind
    scores: int = 0
    captures: int = 0
    gated: bool = False
    adds: bool = False

    def program(self, variant: int) -> Program:
        digest, functions = f"{self} {variant}", []

        def function(kernel, kind="read", **more):
            functions.append(
                FunctionInfo(
                    name=f"f{len(functions)}",
                    kind=kind,
                    kernel=kernel,
                    layers=(0,),
                    submodule="residual.mid",
                    **more,
                )
            )
            return len(functions) - 1

        first, second, infos, captures = [], [], [], []
        for slot in range(self.scores):
            scope = Scope.REQUEST if self.gated and slot == 0 else Scope.NONE
            infos.append(ScoreInfo(function("dot"), 0, None, scope))
            first.append(entry(Opcode.READ, function=Score.LINEAR, v=1, slot=slot))
        for index in range(self.captures):
            captures.append(CaptureInfo(function("capture"), SITES[index % 2]))
            (first, second)[index % 2].append(entry(Opcode.CAPTURE, u=index))
        mask = 1
        if self.gated:
            gate = {"u": Reduce.MEAN, "v": Scope.REQUEST, "lo": 0.1, "bit": 2}
            second.append(entry(Opcode.COMPARE, function=Comparison.GREATER, **gate))
            mask = 2
        if self.adds:
            number = 1 + function("steering_vector", "write", gated=self.gated)
            add = {"u": 1, "gain": 1.0, "clause_mask": mask, "bit": 1}
            second.append(entry(Opcode.ADD, counter=number, **add))
        tables = {
            site.table[0]: tuple(entries)
            for site, entries in zip(SITES, (first, second), strict=True)
            if entries
        }
        return Program(
            digest,
            (Clause(self.when),),
            tables,
            tuple(functions),
            tuple(infos),
            tuple(captures),
        )

    def acted(self, request: Any, last: int) -> int:
        """Tokens up to `last` on which the add acts."""
        seen, count = [], 0
        for position in range(request.start, last + 1):
            holds = WHEN[self.when](position, request.prompt_len)
            if holds:
                seen.append(score(0, request.token(position), position))
            if self.gated:
                count += bool(seen) and sum(seen) / len(seen) > 0.1
            else:
                count += holds
        return count


def entry(opcode, **fields) -> Entry:
    return Entry(stage=Stage.STREAM, opcode=opcode, **({"clause_mask": 1} | fields))


KINDS = [
    None,
    Kind(ClauseKind.ALL, adds=True),
    Kind(ClauseKind.ALL, scores=1),
    Kind(ClauseKind.ALL, scores=2, captures=2, adds=True),
    Kind(ClauseKind.PROMPT, scores=3, adds=True),
    Kind(ClauseKind.LAST, captures=2),
    Kind(ClauseKind.PROMPT, captures=1, scores=1),
    Kind(ClauseKind.GENERATED, captures=1),
    Kind(ClauseKind.ALL, scores=1, gated=True, adds=True),
    Kind(ClauseKind.ALL, scores=2, gated=True, adds=True, captures=1),
]
