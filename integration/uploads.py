"""What changes in the tables before a step, sent to the device in one piece."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from eyesplice.integration.buffers import BLOCK, Buffers

_INDEX_WORDS: Final = 2
_BLOCK_BYTES: Final = 4 * BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Contents of one row in each of several tables, wherever the row is.

    Attributes:
        first: int64 `[blocks]`, each block's place if the row is row 0.
        step: int64 `[blocks]`, how far apart its places in two rows are.
        data: int32 `[blocks, BLOCK]`.
    """

    first: NDArray[np.int64]
    step: NDArray[np.int64]
    data: NDArray[np.int32]


class Uploads:
    """Blocks of `Buffers.words`, gathered on the host until the next step."""

    def __init__(self, buffers: Buffers) -> None:
        self._blocks = buffers.words.view(-1, BLOCK)
        self._first = {name: word // BLOCK for name, word in buffers.first.items()}
        parts = {name: getattr(buffers, name) for name in buffers.first}
        parts["program"] = buffers.program.flatten(0, 1)
        self._row_blocks: dict[str, int] = {
            name: part.stride(0) * part.itemsize // _BLOCK_BYTES
            for name, part in parts.items()
        }
        self._rows = buffers.rows
        self._index: list[NDArray[np.int64]] = []
        self._data: list[NDArray[np.int32]] = []

    def row_words(self, name: str) -> int:
        """int32 words of a row of a table, its padding included."""
        return self._row_blocks[name] * BLOCK

    def blocks(
        self, rows: Iterable[tuple[str, int, NDArray[np.int32] | None]]
    ) -> Blocks:
        """Contents of a row in several tables.

        Args:
            rows: a part of `Buffers.words`; which of the tables, for `program` (0 for
                others); and the row's words, None for zeros.
        """
        first, step, data = [], [], []
        for name, table, words in rows:
            blocks = self._row_blocks[name]
            begin = self._first[name] + table * self._rows * blocks
            first.append(np.arange(begin, begin + blocks, dtype=np.int64))
            step.append(np.full(blocks, blocks, dtype=np.int64))
            zeros = np.zeros((blocks, BLOCK), dtype=np.int32)
            data.append(zeros if words is None else words.reshape(blocks, BLOCK))
        return Blocks(np.concatenate(first), np.concatenate(step), np.concatenate(data))

    def put(self, blocks: Blocks, row: int) -> None:
        """Write contents to a row; to no row of a table twice before the next `send`."""
        self._index.append(blocks.first + row * blocks.step)
        self._data.append(blocks.data)

    def send(self, table: NDArray[np.int32]) -> torch.Tensor:
        """Write what was gathered, in stream order and without waiting for it.

        One copy to the device, and one launch if there is anything to write. The pinned
        source is new each time: the copy of an earlier step may still be under way.
        Torch's allocator does not reuse it before the copy has run.

        Args:
            table: an even number of words that travel along.

        Returns:
            int32, the table on the device.
        """
        device, blocks = self._blocks.device, sum(map(len, self._index))
        data = table.size + _INDEX_WORDS * blocks
        size = data + BLOCK * blocks
        staged = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        host = staged.numpy()
        host[: table.size] = table.ravel()
        if blocks:
            np.concatenate(self._index, out=host[table.size : data].view(np.int64))
            np.concatenate(self._data, out=host[data:].reshape(-1, BLOCK))
        there = staged.to(device, non_blocking=True)
        if blocks:
            index = there[table.size : data].view(torch.int64)
            self._blocks.index_copy_(0, index, there[data:].view(-1, BLOCK))
            self._index.clear()
            self._data.clear()
        return there[: table.size].view(table.shape)
