"""What the opcodes that read make of a value: scores and captured rows."""

from typing import Final

import torch
from torch import Tensor

from eyesplice.ops.layout import LogHead, LogRow, Score, Slot
from eyesplice.ops.reference_writes import Entry
from eyesplice.ops.work import Work

COSINE_FLOOR: Final = 1e-12


def read(h: Tensor, entry: Entry, bank: Tensor) -> Tensor:
    """`[tokens]` fp32, the entry's `Score` of the rows `h` `[tokens, width]`, fp32.

    TANH_COSINE is CAST's similarity (Lee et al. 2025, arXiv 2409.05907, eq. 3).
    """
    v = bank[entry.v, : h.shape[-1]].float()
    function = Score(entry.function)
    match function:
        case Score.COSINE:
            return _cosine(h, v)
        case Score.NORM:
            return _length(h)
        case Score.DISTANCE:
            return _length(h - v)
        case Score.TANH_COSINE:
            return _cosine(h, torch.tanh((h @ v / (v @ v))[:, None] * v))
    p = entry.in_scale * (h @ v) + entry.bias
    match function:
        case Score.SIGMOID:
            return p.sigmoid()
        case Score.RELU:
            return p.relu()
        case Score.JUMP_RELU:
            return torch.where(p <= entry.hi, 0.0, p)
    return p


def _length(h: Tensor) -> Tensor:
    return h.square().sum(dim=-1).sqrt()


def _cosine(h: Tensor, v: Tensor) -> Tensor:
    size = _length(h) * _length(v)
    return (h * v).sum(dim=-1) / size.clamp(min=COSINE_FLOOR)


def capture(h: Tensor, tokens: Tensor, capture_index: int, work: Work) -> None:
    """Append rows to `capture` while this step's share of it lasts.

    Args:
        h: `[tokens, width]` fp32.
        tokens: int64 `[tokens]`, where they are in the step.
        capture_index: which of its request's captures this is.
        work: `capture` and its log are written, and `Slot.LOST`.
    """
    slot = work.slot_of_token[tokens].long()
    head = work.capture_log[0]
    count, start, limit = head[: len(LogHead)].tolist()
    head[LogHead.COUNT] += len(tokens)
    kept = max(min(len(tokens), limit - count), 0)
    rows = torch.arange(start + count, start + count + kept)
    work.capture[rows, : h.shape[-1]] = h[:kept].to(work.capture.dtype)
    log = work.capture_log[1:]
    log[rows, LogRow.SLOT] = slot[:kept].int()
    log[rows, LogRow.CAPTURE] = capture_index
    first = work.slots[slot[:kept]]
    position = first[:, Slot.FIRST_POSITION] - first[:, Slot.FIRST_TOKEN]
    log[rows, LogRow.POSITION] = position + tokens[:kept].int()
    lost = slot[kept:]
    work.slots[:, Slot.LOST].index_add_(0, lost, torch.ones_like(lost).int())
