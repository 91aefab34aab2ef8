"""What requests found out, on its way from the worker to the front end.

worker       one `StepAnswer` a step, pickled with the runner's output
engine core  one `RawAnswer` a request, which adds its steps up
front end    the same again, from the plain form that the engine core sends
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Captured = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Positions `[rows]` and the bytes `[rows, bytes per row]` of the captured rows."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """One step of every request of the batch that has a program.

    Attributes:
        place: each request's row in `counts` and `lost`.
        counts: int32 `[slots, 2, functions]`, since the request's slot was empty.
        lost: int32 `[slots]`, captured rows that found no room, likewise.
        scores: first position and float32 `[tokens, scores]` of requests with reads;
            NaN where nothing was read.
        captures: rows of each capture of a program, by its index.
        errors: why a request runs without effect.
        dtype: of captured rows, as torch names it without its prefix.
        widths: elements of a captured row at each submodule.
    """

    place: Mapping[str, int]
    counts: NDArray[np.int32]
    lost: NDArray[np.int32]
    scores: Mapping[str, tuple[int, NDArray[np.float32]]]
    captures: Mapping[str, Mapping[int, Captured]]
    errors: Mapping[str, str]
    dtype: str
    widths: Mapping[str, int]


@dataclass(slots=True)
class RawAnswer:
    """What one request found out, so far or since the last time that it was sent.

    Rows are in the order of their arrival; a position that comes again, after a
    preemption, overwrites the one before.

    Attributes:
        positions: int32 `[tokens]`, those of the rows of `scores`.
        scores: float32 `[tokens, num_scores]`.
        num_scores: scores of the request's program.
        captures: int32 positions and the rows' bytes, by the capture's index.
        counts: the two rows of the request's `counts`.
        lost: captured rows that found no room.
        error: why the request runs without effect.
        dtype, widths: as in `StepAnswer`.
    """

    positions: bytearray = field(default_factory=bytearray)
    scores: bytearray = field(default_factory=bytearray)
    num_scores: int = 0
    captures: dict[int, tuple[bytearray, bytearray]] = field(default_factory=dict)
    counts: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    lost: int = 0
    error: str | None = None
    dtype: str = ""
    widths: Mapping[str, int] = field(default_factory=dict)

    def add_totals(self, step: StepAnswer, request_id: str) -> None:
        """Take a step's counts of the request, which are totals up to it."""
        self.error = step.errors.get(request_id, self.error)
        self.dtype, self.widths = step.dtype, step.widths
        place = step.place.get(request_id)
        if place is not None:
            acted, evaluated = step.counts[place].tolist()
            self.counts = acted, evaluated
            self.lost = int(step.lost[place])

    def add_rows(self, step: StepAnswer, request_id: str) -> None:
        """Add the rows that a step read for the request."""
        if request_id in step.scores:
            first, scores = step.scores[request_id]
            tokens, self.num_scores = scores.shape
            self.positions += np.arange(first, first + tokens, dtype=np.int32).tobytes()
            self.scores += scores.tobytes()
        for index, (positions, rows) in step.captures.get(request_id, {}).items():
            self._add_capture(index, positions.tobytes(), rows.tobytes())

    def _add_capture(self, index: int, positions: bytes, rows: bytes) -> None:
        kept = self.captures.setdefault(index, (bytearray(), bytearray()))
        kept[0].extend(positions)
        kept[1].extend(rows)

    def to_plain(self) -> dict[str, Any]:
        """The answer in types that msgpack keeps."""
        return {
            "positions": bytes(self.positions),
            "scores": bytes(self.scores),
            "num_scores": self.num_scores,
            "captures": [
                [index, bytes(positions), bytes(rows)]
                for index, (positions, rows) in self.captures.items()
            ],
            "counts": list(self.counts),
            "lost": self.lost,
            "error": self.error,
            "dtype": self.dtype,
            "widths": dict(self.widths),
        }

    def add_plain(self, plain: Mapping[str, Any]) -> None:
        """Add what `to_plain` gave for the steps after the ones that are here."""
        self.positions += plain["positions"]
        self.scores += plain["scores"]
        self.num_scores = plain["num_scores"] or self.num_scores
        for index, positions, rows in plain["captures"]:
            self._add_capture(index, positions, rows)
        acted, evaluated = plain["counts"]
        self.counts = acted, evaluated
        self.lost = plain["lost"]
        self.error = plain["error"] or self.error
        self.dtype = plain["dtype"] or self.dtype
        self.widths = plain["widths"] or self.widths

    def last_position(self) -> int:
        """The highest position that has a row of scores, -1 if none has."""
        return int(np.frombuffer(self.positions, np.int32).max(initial=-1))

    def score_rows(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ascending positions `[tokens]` and their scores `[tokens, num_scores]`."""
        scores = np.frombuffer(self.scores, np.float32)
        rows = scores.reshape(-1, max(self.num_scores, 1))
        return _last_of_each(np.frombuffer(self.positions, np.int32), rows)

    def captured(
        self, indices: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ascending positions and bytes `[rows, bytes per row]` of captures of one site.

        Args:
            indices: captures whose rows are put together.
        """
        found = [self.captures[index] for index in indices if index in self.captures]
        positions = np.concatenate(
            [np.frombuffer(p, np.int32) for p, _ in found] or [np.empty(0, np.int32)]
        )
        data = np.concatenate(
            [np.frombuffer(rows, np.uint8) for _, rows in found]
            or [np.empty(0, np.uint8)]
        )
        return _last_of_each(positions, data.reshape(len(positions) or 1, -1))


def _last_of_each(
    positions: NDArray[np.int32], rows: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """The last row of each position, by ascending position."""
    kept, from_end = np.unique(positions[::-1], return_index=True)
    return kept, rows[len(positions) - 1 - from_end]
