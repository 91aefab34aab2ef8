"""Runs a lowered program over a small model made of the reference ops, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyesplice.fx_passes.program import (
    Program,
    pack,
    pack_clauses,
    pack_reads,
    pack_tables,
    pack_token_ids,
)
from eyesplice.fx_passes.sites import Table
from eyesplice.ops import reference
from eyesplice.ops.layout import ALL_FAMILIES, LogHead, LogRow, PerRequest, Stage
from eyesplice.ops.work import empty_work
from tests.request_world import HIDDEN, NUM_EXPERTS, NUM_LAYERS, Vectors

SLOT = 2
MAX_ENTRIES = 64
MAX_SCORES = 32
_SEED = torch.Generator().manual_seed(5)
_MIX = torch.randn(NUM_LAYERS, 2, HIDDEN, HIDDEN, generator=_SEED) / HIDDEN**0.5
_GATE = torch.randn(NUM_LAYERS, HIDDEN, NUM_EXPERTS, generator=_SEED)


@dataclass(frozen=True)
class Outcome:
    """What a request left behind, one row a token.

    Attributes:
        final: `[tokens, hidden]`, the last norm's result.
        score: `[tokens, scores]`, NaN where nothing was read.
        select: `[tokens]`, unsigned bits.
        counts: `[2, functions]`.
        captured: rows by (capture, position).
    """

    final: Tensor
    score: Tensor
    select: list[int]
    counts: Tensor
    captured: dict[tuple[int, int], Tensor]


def run(
    program: Program,
    vectors: Vectors,
    token_ids: Sequence[int],
    prompt_len: int,
    steps: Sequence[int],
    token_sets: Tensor | None = None,
) -> Outcome:
    """One request of `len(token_ids)` tokens, `steps` tokens at a time."""
    num_tokens = len(token_ids)
    assert sum(steps) == num_tokens
    work = list(empty_work(num_tokens, 4, MAX_SCORES, 64, HIDDEN, torch.float32, "cpu"))
    per_request = torch.zeros(4, 1, dtype=torch.int32)
    per_request[PerRequest.ROW] = 1
    per_request[PerRequest.PROMPT_LEN] = prompt_len
    per_request[PerRequest.SLOT] = SLOT
    per_request[PerRequest.SCORES] = len(program.scores)
    clauses = torch.stack([pack_clauses([]), pack_clauses(program.clauses)])
    listed = torch.stack([pack_token_ids(program)] * 2)
    reads = torch.stack([pack_reads(program, MAX_SCORES)] * 2)
    if token_sets is None:
        token_sets = torch.zeros(4, 32, dtype=torch.int32)
    embedding = torch.randn(1000, HIDDEN, generator=torch.Generator().manual_seed(9))
    kinds = [("pre", NUM_LAYERS)] + [
        (kind, layer)
        for layer in range(NUM_LAYERS)
        for kind in ("pre", "mid", "router")
    ]
    empty = pack([], MAX_ENTRIES)
    entries = [program.tables.get(Table(*at), ()) for at in kinds]
    rows = pack_tables(entries, MAX_ENTRIES)
    packed = torch.stack([torch.stack([empty, row]) for row in rows])
    finals, scores, selects, captured, begin = [], [], [], {}, 0
    for length in steps:
        words = torch.zeros(len(kinds), num_tokens, dtype=torch.int32)
        select = torch.zeros(num_tokens, dtype=torch.int32)
        positions = torch.arange(begin, begin + length)
        ids = torch.tensor(token_ids[begin : begin + length])
        starts = torch.tensor([0, length], dtype=torch.int32)
        reference.route_(
            *(words, packed, select, work, per_request, starts, positions, ids),
            *(clauses, listed, token_sets, 1, length, 0, 64),
        )
        own = dict(zip(kinds, zip(words, packed, strict=True), strict=True))
        finals.append(_forward(own, select, vectors, embedding[ids], work))
        reference.collect_(
            work, select, reads, per_request, starts, positions, num_requests=1
        )
        scores.append(work[3][:length, : len(program.scores)].clone())
        selects += [word & 0xFFFFFFFF for word in select[:length].tolist()]
        for i in range(int(work[6][0, LogHead.COUNT])):
            log = work[6][1 + i]
            key = (int(log[LogRow.CAPTURE]), int(log[LogRow.POSITION]))
            captured[key] = work[5][i].clone()
        begin += length
    counts = work[2][SLOT, :, : len(program.functions)]
    return Outcome(torch.cat(finals), torch.cat(scores), selects, counts, captured)


def _forward(
    own: dict[tuple[str, int], tuple[Tensor, Tensor]],
    select: Tensor,
    vectors: Vectors,
    stream: Tensor,
    work: list[Tensor],
) -> Tensor:
    bank, weight = vectors.bank(), torch.ones(HIDDEN)

    def tables(kind: str, layer: int):
        token_map, packed = own[kind, layer]
        return (token_map, select, packed, bank, work, int(ALL_FAMILIES))

    def boundary(kind: str, layer: int, branch: Tensor | None) -> Tensor:
        return reference.boundary_(
            stream, branch, weight, 0.0, 1e-6, *tables(kind, layer)
        )

    branch = None
    for layer in range(NUM_LAYERS):
        y = boundary("pre", layer, branch)
        y = boundary("mid", layer, torch.tanh(y @ _MIX[layer, 0]))
        reference.inline_(y @ _GATE[layer], Stage.BRANCH, *tables("router", layer))
        branch = torch.tanh(y @ _MIX[layer, 1])
    return boundary("pre", NUM_LAYERS, branch)
