"""Layouts that the kernels can read: what a launch looks at before it launches."""

from functools import lru_cache

from torch import Tensor

from eyesplice.ops.layout import WORDS
from eyesplice.ops.work import Work


def check_rows(name: str, tensor: Tensor) -> None:
    """Rows may be apart, elements of a row may not.

    Raises:
        ValueError: they are.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: rows must be contiguous, strides {tensor.stride()}")


def work_of(width: int, tensors: list[Tensor]) -> Work:
    """The work tensors by name, for values of `width` elements.

    Raises:
        ValueError: gaps in one of them, or captured rows that are too short.
    """
    work = Work(*tensors)
    for name, tensor in work._asdict().items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, strides {tensor.stride()}")
    if work.capture.shape[1] < width:
        raise ValueError(
            f"capture rows of {work.capture.shape[1]} are less than {width} wide"
        )
    return work


def check_program(program: Tensor) -> None:
    """One program table, or all of them.

    Raises:
        ValueError: gaps between the slots of a row.
    """
    if program.stride()[-2:] != (WORDS, 1):
        raise ValueError(f"program: slots must be contiguous, {program.stride()}")


def check_maps(
    num_tokens: int, token_map: Tensor, select: Tensor, program: Tensor
) -> None:
    """Per-token maps of a step, and a program table.

    Raises:
        ValueError: gaps in one of them, or fewer tokens than the step has.
    """
    check_rows("token_map", token_map)
    check_rows("select", select)
    if min(token_map.numel(), select.numel()) < num_tokens:
        raise ValueError(f"{token_map.numel()} map entries for {num_tokens} tokens")
    check_program(program)


def check_tables(
    num_tokens: int,
    width: int,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    bank: Tensor,
) -> None:
    """What every op that runs programs takes besides its values.

    Raises:
        ValueError: as `check_maps`, or vectors shorter than the values.
    """
    check_maps(num_tokens, token_map, select, program)
    check_rows("bank", bank)
    if bank.shape[1] < width:
        raise ValueError(f"bank rows of {bank.shape[1]} are less than {width} wide")


@lru_cache
def block_of(width: int) -> int:
    """The power of two that covers a row: what a Triton range can count to."""
    return 1 << (width - 1).bit_length()
