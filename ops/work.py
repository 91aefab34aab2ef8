"""The `work` argument of the ops: what they write for one another and for the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from eyesplice.ops.layout import (
    CARRY_WORDS,
    LOG_WORDS,
    MAX_FUNCTIONS,
    SLOT_WORDS,
    WORK,
)


class Work(NamedTuple):
    """The tensors of `layout.WORK`, by name; shapes and dtypes are given there."""

    slot_of_token: Tensor
    slots: Tensor
    counts: Tensor
    score: Tensor
    carry: Tensor
    capture: Tensor
    capture_log: Tensor


assert Work._fields == WORK


def empty_work(
    max_tokens: int,
    num_slots: int,
    max_scores: int,
    capture_rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Work:
    """Work tensors in which no request has begun: zeros, and no score.

    Args:
        max_tokens: tokens of the largest step.
        num_slots: slots, slot 0 included.
        max_scores: scores per program.
        capture_rows: rows that may wait for the host.
        width, dtype: of the widest value that may be captured.
        device: where the ops run.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Work(
        slot_of_token=zeros(max_tokens),
        slots=zeros(num_slots, SLOT_WORDS),
        counts=zeros(num_slots, 2, MAX_FUNCTIONS),
        score=zeros(max_tokens, max_scores, dtype=torch.float32).fill_(torch.nan),
        carry=zeros(num_slots, max_scores, CARRY_WORDS, dtype=torch.int64),
        capture=zeros(capture_rows, width, dtype=dtype),
        capture_log=zeros(1 + capture_rows, LOG_WORDS),
    )
