"""What a token has to do at one boundary, in one word: an entry of its map.

    0                    nothing: the token is idle there
    bits 0 to 12         the row of its program, not 0
    bits 13 to 27        if the program only adds there: the bank row of its first vector
    bits 28 to 30        if it only adds there: how many vectors, else 0

The kernel loads this word before anything else, so what the word says saves a load that
waits for another. A token is idle at a boundary where its program has nothing, or nothing
that can act on it: see `eyesplice.ops.acting`.
"""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from eyesplice.ops.layout import Header, Word
from eyesplice.ops.simple import MAX_ADDS, SomeEntry, adds

ROW_BITS: Final = 13
VECTOR_BITS: Final = 15
ROW_MASK: Final = (1 << ROW_BITS) - 1
VECTOR_MASK: Final = (1 << VECTOR_BITS) - 1
ADDS_SHIFT: Final = ROW_BITS + VECTOR_BITS
MAX_ROWS: Final = 1 << ROW_BITS
"""Program rows that a map can name, the idle one included."""

assert ADDS_SHIFT + MAX_ADDS.bit_length() <= 31, "a word is never negative"


def words_of(program: Tensor, rows: Tensor, select: Tensor) -> Tensor:
    """The words of tokens whose programs are in these rows.

    Args:
        program: int32 `[tables, rows, 1 + max_entries, WORDS]`.
        rows: integers `[n]`.
        select: int32 `[n]`, the clauses of their programs that are true before the step.

    Returns:
        int32 `[tables, n]`.
    """
    found = program[:, rows.long()]
    header, first = found[:, :, 0], found[:, :, 1, Word.U]
    number = header[..., Header.ADDS]
    number = number * ((rows != 0) & (first > 0) & (first <= VECTOR_MASK))
    words = rows | number << ADDS_SHIFT | first * (number > 0) << ROW_BITS
    clauses = header[..., Header.CLAUSES]
    acts = (clauses == 0) | (clauses & select != 0)
    acts &= (header[..., Header.END_NORMED] > 0) & (rows != 0)
    return (words * acts).int()


def word(row: int, entries: Sequence[SomeEntry]) -> int:
    """The word of a token whose program is `entries`, in `row`, where they can act."""
    if not entries or row == 0:
        return 0
    number, first = adds(entries), entries[0].u
    if not 0 < first <= VECTOR_MASK:
        number = 0
    return row | number << ADDS_SHIFT | (first if number else 0) << ROW_BITS
