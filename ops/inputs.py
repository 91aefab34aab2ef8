"""Hostile inputs for the ops: poisoned memory, guarded buffers, random programs.

Whatever an op must not read is NaN, and whatever it must not write is guarded, so that
a leak shows as a NaN or a changed guard and never as a small error.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from eyesplice.ops.layout import (
    ALL_FAMILIES,
    FLOAT_WORDS,
    PRESERVE_NORM,
    WORDS,
    Family,
    Function,
    Header,
    Opcode,
    Stage,
    Word,
)
from eyesplice.ops.simple import adds, simple
from eyesplice.ops.token_map import word
from eyesplice.ops.work import Work, empty_work

POISON: Final = 0x7FC00000
"""A quiet NaN as fp32 bits, and as an int32 an index far outside every table."""

ALL_CLAUSES: Final = -1
MARGIN: Final = 256
"""Guard elements on each side: 512 bytes or more, so that alignment stays."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry before it is packed; fields as in `layout.Word`."""

    opcode: Opcode
    stage: Stage
    u: int = 0
    v: int = 0
    function: int = Function.IDENTITY
    clause_mask: int = ALL_CLAUSES
    gain: float = 1.0
    in_scale: float = 1.0
    bias: float = 0.0
    lo: float = 0.0
    hi: float = 0.0
    rank: int = 0
    bias_row: int = 0
    flags: int = 0
    counter: int = 0
    slot: int = 0
    bit: int = 0

    @property
    def writes(self) -> bool:
        """Whether it changes the value that it runs on."""
        return Opcode.ADD <= self.opcode <= Opcode.ROUTER


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor inside a larger buffer whose ends must keep their bits."""

    tensor: Tensor
    buffer: Tensor

    def intact(self) -> bool:
        """Whether nothing was written before or after the tensor."""
        margin = MARGIN * self.buffer.element_size()
        found, expected = self.buffer.view(torch.uint8), _guard(self.buffer)
        return torch.equal(found[:margin], expected[:margin]) and torch.equal(
            found[-margin:], expected[-margin:]
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call of a row op, and the programs they hold.

    `programs[row - 1]` are the entries of program row `row`.
    """

    stream: Tensor
    branch: Tensor | None
    weight: Tensor
    weight_offset: float
    eps: float
    token_map: Tensor
    select: Tensor
    program: Tensor
    bank: Tensor
    programs: tuple[tuple[Entry, ...], ...]
    work: Work
    families: Family = ALL_FAMILIES

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], int]:
        """The arguments that every row op ends with."""
        maps = self.token_map, self.select
        return *maps, self.program, self.bank, list(self.work), int(self.families)


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """NaN in every element, or `POISON` for integers."""
    value = float("nan") if dtype.is_floating_point else POISON
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def guarded(values: Tensor) -> Guarded:
    """A copy of `values` with guards before and after it."""
    size = values.numel() + 2 * MARGIN
    buffer = torch.empty(size, dtype=values.dtype, device=values.device)
    buffer.view(torch.uint8).copy_(_guard(buffer))
    inner = buffer[MARGIN : MARGIN + values.numel()].view(values.shape)
    inner.copy_(values)
    return Guarded(inner, buffer)


def pack(entry: Entry) -> list[int]:
    """The entry's `WORDS` int32 words."""
    words = [POISON] * WORDS
    for place in Word:
        field = getattr(entry, place.name.lower())
        words[place] = _bits(field) if place in FLOAT_WORDS else _int32(field)
    return words


def pack_programs(
    programs: Sequence[Sequence[Entry]], max_entries: int, poison_row: int = 0
) -> Tensor:
    """`[1 + programs, 1 + max_entries, WORDS]` int32 on the CPU; row 0 is empty.

    Slots that hold no entry would add NaN times bank row `poison_row` if they ran. Every
    token of a program is to be looked at, whatever its clauses are.
    """
    trap = pack(Entry(Opcode.ADD, Stage.BRANCH, poison_row, gain=float("nan")))
    rows = []
    for program in [(), *programs]:
        entries = sorted(program, key=lambda entry: entry.stage)
        header = [POISON] * WORDS
        for stage in Stage:
            header[stage] = sum(entry.stage <= stage for entry in entries)
            writes = any(entry.writes for entry in entries if entry.stage == stage)
            header[Header.WRITES_BRANCH + stage] = int(writes)
        header[Header.SIMPLE] = simple(entries)
        header[Header.ADDS] = adds(entries)
        header[Header.CLAUSES] = 0
        slots = [header, *map(pack, entries)]
        rows.append(slots + [trap] * (1 + max_entries - len(slots)))
    return torch.tensor(rows, dtype=torch.int32)


def map_words(rows: Sequence[int], programs: Sequence[Sequence[Entry]]) -> Tensor:
    """The map of tokens whose programs are in `rows`; `programs[row - 1]` is row's."""
    words = [0]
    for row, program in enumerate(programs, start=1):
        words.append(word(row, sorted(program, key=lambda entry: entry.stage)))
    return torch.tensor([words[row] for row in rows], dtype=torch.int32)


def random_entries(
    generator: torch.Generator,
    bank_rows: Sequence[int],
    per_stage: int,
    width: int,
    max_gain: float,
) -> tuple[Entry, ...]:
    """Writes of every stage but ROUTER, with projections of order 1.

    The last three of `bank_rows` must be neighbours: there AFFINE entries lie.
    """

    def number(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def choice(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    def entry(stage: Stage) -> Entry:
        opcode = _WRITES[choice(len(_WRITES))]
        rank = 1 + choice(3) if opcode == Opcode.AFFINE else 0
        rows = bank_rows[-3:] if rank else bank_rows
        first = len(rows) - max(rank - 1, 0)
        return Entry(
            opcode=opcode,
            stage=stage,
            u=rows[choice(first)],
            v=rows[choice(first)],
            function=Function(choice(len(Function))),
            clause_mask=_MASKS[choice(len(_MASKS))],
            gain=number(-max_gain, max_gain),
            in_scale=number(0.5, 1.0) / width**0.5,
            bias=number(-0.3, 0.3),
            lo=number(-1.0, 0.0),
            hi=number(0.0, 1.0),
            rank=rank,
            bias_row=(0, bank_rows[0])[choice(2)],
            flags=PRESERVE_NORM * (choice(4) == 0),
        )

    return tuple(entry(stage) for stage in Stage for _ in range(per_stage))


_MASKS: Final = (ALL_CLAUSES, 1, 1 << 7, -(1 << 31), 0)
_WRITES: Final = (
    Opcode.NONE,
    Opcode.ADD,
    Opcode.RANK1,
    Opcode.RANK1,
    Opcode.AFFINE,
    Opcode.REPLACE,
    Opcode.MASK,
)


def random_case(
    num_tokens: int,
    width: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str = "cpu",
    weight_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    has_branch: bool = True,
    num_programs: int = 5,
    per_stage: int = 2,
    max_gain: float = 0.5,
    extra_width: int = 0,
) -> Case:
    """Tokens of mixed programs, some idle, in tables whose every unused part is poison.

    Args:
        num_tokens, width, dtype: of the values.
        seed: equal seeds give equal cases on every device.
        device: where the tensors end up.
        weight_dtype: `dtype` if None.
        weight_offset: as in `boundary_`.
        has_branch: False for the first norm of a model.
        num_programs: program rows besides row 0; tokens take them in turn.
        per_stage: entries of each stage of each program.
        max_gain: of an entry; a long program of large gains amplifies every rounding.
        extra_width: poisoned columns of the bank beyond `width`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    used = [1, 3, 6, 7, 8]
    bank = poisoned((10, width + extra_width), dtype, "cpu")
    bank[used, :width] = normal(len(used), width).to(dtype)
    programs = tuple(
        random_entries(generator, used, per_stage, width, max_gain)
        for _ in range(num_programs)
    )
    token_map = poisoned((num_tokens + 7,), torch.int32, "cpu")
    token_map[:num_tokens] = map_words(
        (torch.arange(num_tokens) % (num_programs + 1)).tolist(), programs
    )
    select = poisoned((num_tokens + 7,), torch.int32, "cpu")
    select[:num_tokens] = torch.randint(
        -(2**31), 2**31, (num_tokens,), generator=generator
    )
    weight = 1.0 - weight_offset + 0.2 * normal(width)
    return Case(
        stream=normal(num_tokens, width).to(dtype).to(device),
        branch=normal(num_tokens, width).to(dtype).to(device) if has_branch else None,
        weight=weight.to(weight_dtype or dtype).to(device),
        weight_offset=weight_offset,
        eps=1e-5,
        token_map=token_map.to(device),
        select=select.to(device),
        program=pack_programs(programs, 3 * per_stage + 2).to(device),
        bank=bank.to(device),
        programs=programs,
        work=poisoned_work(num_tokens + 7, 1 + num_programs, width, dtype, device),
    )


def poisoned_work(
    max_tokens: int,
    num_slots: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    max_scores: int = 3,
    capture_rows: int = 5,
) -> Work:
    """Work tensors of which writes need nothing: no step has begun in them."""
    work = empty_work(
        max_tokens, num_slots, max_scores, capture_rows, width, dtype, device
    )
    for tensor in work:
        tensor.copy_(poisoned(tensor.shape, tensor.dtype, device))
    return work


def _int32(bits: int) -> int:
    """The int32 that holds these 32 bits, signed or unsigned."""
    return int(bits) - 2**32 if bits >= 2**31 else int(bits)


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _guard(like: Tensor) -> Tensor:
    """A byte pattern as long as `like`."""
    size = like.numel() * like.element_size()
    return (torch.arange(size, device=like.device) % 251 + 3).to(torch.uint8)
