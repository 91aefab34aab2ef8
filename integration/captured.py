"""Rows that one step captured for one request: copied once, and then handed on whole."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from eyesplice.integration.array_frames import array_of

Rows = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Positions `[rows]` and the bytes `[rows, bytes per row]` of captured rows."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Rows of one request and step, of captures whose rows are as long.

    Attributes:
        captures: int32 `[rows]`, ascending indices of the program's captures.
        positions: int32 `[rows]`.
        data: uint8 `[rows, bytes per row]`, contiguous.
    """

    captures: NDArray[np.int32]
    positions: NDArray[np.int32]
    data: NDArray[np.uint8]

    def to_plain(self) -> list[NDArray[Any]]:
        """The fields, for vLLM's encoder."""
        return [self.captures, self.positions, self.data]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Self:
        """What `to_plain` gave, in this process or after vLLM's decoder."""
        return cls(*map(array_of, plain))

    def parts(self) -> Iterable[tuple[int, Rows]]:
        """Each capture that has rows, and these."""
        starts = np.flatnonzero(np.diff(self.captures, prepend=-1))
        stops = [*starts[1:].tolist(), len(self.captures)]
        indices = self.captures[starts].tolist()
        for index, start, stop in zip(indices, starts.tolist(), stops, strict=True):
            yield index, (self.positions[start:stop], self.data[start:stop])


def by_capture(chunks: Iterable[Captured]) -> dict[int, list[Rows]]:
    """The rows of each capture, in the order of their arrival."""
    found: dict[int, list[Rows]] = {}
    for chunk in chunks:
        for index, rows in chunk.parts():
            found.setdefault(index, []).append(rows)
    return found


def together(parts: Sequence[Rows]) -> Rows:
    """Rows after rows; of a single part it is that part."""
    if not parts:
        return np.empty(0, np.int32), np.empty((1, 0), np.uint8)
    if len(parts) == 1:
        return parts[0]
    positions, data = zip(*parts, strict=True)
    return np.concatenate(positions), np.concatenate(data)
