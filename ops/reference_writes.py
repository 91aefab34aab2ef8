"""What the opcodes that write make of a value: fp32, many tokens at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from eyesplice.ops.layout import (
    FLOAT_WORDS,
    PRESERVE_NORM,
    Family,
    Function,
    Opcode,
    Word,
)


class Entry(NamedTuple):
    """An entry's fields, in the order of `Word`."""

    opcode: int
    function: int
    u: int
    v: int
    clause_mask: int
    gain: float
    in_scale: float
    bias: float
    lo: float
    hi: float
    rank: int
    bias_row: int
    flags: int
    counter: int
    slot: int
    bit: int


assert Entry._fields == tuple(word.name.lower() for word in Word)


def decode(words: Tensor) -> list[Entry]:
    """The entries of int32 `[entries, WORDS]`."""
    numbers = words.view(torch.float32).tolist()
    return [
        Entry(*(row[1 if word in FLOAT_WORDS else 0][word] for word in Word))
        for row in zip(words.tolist(), numbers, strict=True)
    ]


def write(h: Tensor, entry: Entry, bank: Tensor, families: int) -> Tensor:
    """The rows `h` `[tokens, width]`, fp32, after an entry that writes."""
    result = _write(h, entry, bank[:, : h.shape[-1]])
    if entry.flags & PRESERVE_NORM and families & Family.PRESERVE_NORM:
        before = h.norm(dim=-1, keepdim=True)
        after = result.norm(dim=-1, keepdim=True)
        result = result * torch.where(after > 0, before / after, 1.0)
    return result


def _write(h: Tensor, entry: Entry, bank: Tensor) -> Tensor:
    u = bank[entry.u].float()
    match entry.opcode:
        case Opcode.ADD:
            return h + entry.gain * u
        case Opcode.RANK1:
            p = entry.in_scale * (h @ bank[entry.v].float()) + entry.bias
            return h + (entry.gain * apply_function(p, entry))[:, None] * u
        case Opcode.AFFINE:
            return h + entry.gain * _affine(h, entry, bank)
        case Opcode.REPLACE:
            return h + entry.gain * (u - h)
        case Opcode.MASK:
            return h + entry.gain * h * u
        case Opcode.ROUTER:
            return _router(h, entry.gain, u)
        case _:
            raise AssertionError(f"opcode {entry.opcode} writes nothing")


def _affine(h: Tensor, entry: Entry, bank: Tensor) -> Tensor:
    """sum_r f(in_scale * (v_r . h) + b_r) * u_r, as two small products."""
    u = bank[entry.u : entry.u + entry.rank].float()
    v = bank[entry.v : entry.v + entry.rank].float()
    p = entry.in_scale * (h @ v.T)
    if entry.bias_row:
        p = p + bank[entry.bias_row, : entry.rank].float()
    return apply_function(p, entry) @ u


def _router(h: Tensor, epsilon: float, u: Tensor) -> Tensor:
    """SteerMoE's edit of router logits (Fayyaz et al. 2026)."""
    s = h.log_softmax(dim=-1)
    raised = s.amax(dim=-1, keepdim=True) + epsilon
    lowered = s.amin(dim=-1, keepdim=True) - epsilon
    return torch.where(u > 0, raised, torch.where(u < 0, lowered, s))


def apply_function(p: Tensor, entry: Entry) -> Tensor:
    """The entry's `Function` of the projections `p`."""
    match Function(entry.function):
        case Function.IDENTITY:
            return p
        case Function.RELU:
            return p.relu()
        case Function.SIGMOID:
            return p.sigmoid()
        case Function.STEP:
            return (p >= 0).float()
        case Function.CLIP:
            return p.clamp(entry.lo, entry.hi)
        case Function.TOWARD_CLIP:
            return p.clamp(entry.lo, entry.hi) - p
        case Function.TOWARD_VALUE:
            return torch.where(p > entry.hi, entry.lo - p, entry.lo)
