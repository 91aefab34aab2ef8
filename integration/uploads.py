"""What changes in the tables before a step, sent to the device in one piece."""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from eyesplice.integration.buffers import BLOCK, Buffers

_INDEX_WORDS: Final = 2
_BLOCK_BYTES: Final = 4 * BLOCK


class Uploads:
    """Blocks of `Buffers.words`, gathered on the host until the next step."""

    def __init__(self, buffers: Buffers) -> None:
        self._blocks = buffers.words.view(-1, BLOCK)
        self._first = {name: word // BLOCK for name, word in buffers.first.items()}
        parts = {name: getattr(buffers, name) for name in buffers.first}
        parts["program"] = buffers.program.flatten(0, 1)
        self._row_blocks = {
            name: part.stride(0) * part.itemsize // _BLOCK_BYTES
            for name, part in parts.items()
        }
        self._index: list[NDArray[np.int64]] = []
        self._data: list[NDArray[np.int32]] = []

    def put(self, name: str, rows: NDArray[np.int64], data: NDArray[np.int32]) -> None:
        """Write rows of a table; no row twice before the next `send`.

        Args:
            name: a table that is a part of `Buffers.words`.
            rows: `[n]`; rows of `program` are numbered over all its tables.
            data: `[n, words of a row]`, a row's padding included.
        """
        blocks = self._row_blocks[name]
        index = self._first[name] + rows[:, None] * blocks + np.arange(blocks)
        self._index.append(index.ravel())
        self._data.append(data.reshape(-1, BLOCK))

    def clear(self, name: str, rows: NDArray[np.int64]) -> None:
        """Make rows of a table zero."""
        words = self._row_blocks[name] * BLOCK
        self.put(name, rows, np.zeros((len(rows), words), dtype=np.int32))

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
