"""What requests found out, on its way from the worker to the front end.

worker       one `StepAnswer` a step, pickled with the runner's output
engine core  one `RawAnswer` a request, which adds its steps up
front end    the same again, from the plain form that the engine core sends
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyesplice.integration.captured import Captured, Rows, by_capture, together


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """The scores of one step, of every request of the batch that has any.

    Attributes:
        requests: their ids.
        slots: `[requests]`; no two requests that run have the same.
        columns: `[requests]`, scores of each.
        first_position: `[requests]`, of its first token in this step.
        first_row: `[requests]`, that token's row of `rows`.
        lengths: `[requests]`, its tokens; the fields before are void where it has none.
        rows: float32 `[tokens, most scores]`; NaN where nothing was read.
    """

    requests: Sequence[str]
    slots: NDArray[np.int64]
    columns: NDArray[np.int32]
    first_position: NDArray[np.int32]
    first_row: NDArray[np.int64]
    lengths: NDArray[np.int64]
    rows: NDArray[np.float32]

    def of(self, place: int) -> tuple[int, NDArray[np.float32]]:
        """First position and rows `[tokens, scores]` of one of the requests."""
        first, length = int(self.first_row[place]), int(self.lengths[place])
        rows = self.rows[first : first + length, : int(self.columns[place])]
        return int(self.first_position[place]), rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """One step of every request of the batch that has a program.

    Attributes:
        serial: steps of equal serials are of the same requests in the same slots.
        place: each request's slot.
        first_slot: the slot of the first row of `counts` and `lost`.
        counts: int32 `[slots, 2, functions]`, since the request's slot was empty.
        lost: int32 `[slots]`, captured rows that found no room, likewise.
        scores: the scores, None if no request has any.
        captures: captured rows, by request.
        errors: what a request should know, such as why it runs without effect.
        dtype: of captured rows, as torch names it without its prefix.
        widths: elements of a captured row at each submodule.
    """

    serial: int
    place: Mapping[str, int]
    first_slot: int
    counts: NDArray[np.int32]
    lost: NDArray[np.int32]
    scores: StepScores | None
    captures: Mapping[str, Sequence[Captured]]
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
        captures: captured rows, as they came.
        counts: the two rows of the request's `counts`.
        lost: captured rows that found no room.
        error: what the request should know, such as why it runs without effect.
        dtype, widths: as in `StepAnswer`.
    """

    positions: bytearray = field(default_factory=bytearray)
    scores: bytearray = field(default_factory=bytearray)
    num_scores: int = 0
    captures: list[Captured] = field(default_factory=list)
    counts: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    lost: int = 0
    error: str | None = None
    dtype: str = ""
    widths: Mapping[str, int] = field(default_factory=dict)
    _by_capture: dict[int, list[Rows]] | None = field(
        default=None, compare=False, repr=False
    )

    def add_totals(self, step: StepAnswer, request_id: str) -> None:
        """Take a step's counts of the request, which are totals up to it."""
        self.error = step.errors.get(request_id, self.error)
        self.dtype, self.widths = step.dtype, step.widths
        slot = step.place.get(request_id)
        if slot is not None:
            row = slot - step.first_slot
            acted, evaluated = step.counts[row].tolist()
            self.counts = acted, evaluated
            self.lost = int(step.lost[row])

    def add_scores(
        self, positions: NDArray[np.int32], scores: NDArray[np.float32]
    ) -> None:
        """Add rows `[tokens, scores]` and their positions `[tokens]`."""
        self.num_scores = scores.shape[1]
        self.positions += positions.tobytes()
        self.scores += scores.tobytes()

    def add_captures(self, captures: Iterable[Captured]) -> None:
        """Add the rows that a step captured for the request."""
        self.captures.extend(captures)
        self._by_capture = None

    def to_plain(self) -> dict[str, Any]:
        """The answer in types that vLLM's encoder takes; captured rows are not copied."""
        return {
            "positions": bytes(self.positions),
            "scores": bytes(self.scores),
            "num_scores": self.num_scores,
            "captures": [captured.to_plain() for captured in self.captures],
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
        self.add_captures(map(Captured.from_plain, plain["captures"]))
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

    def captured(self, indices: Sequence[int]) -> Rows:
        """Ascending positions and bytes `[rows, bytes per row]` of captures of one site.

        Args:
            indices: captures whose rows are put together.
        """
        if self._by_capture is None:
            self._by_capture = by_capture(self.captures)
        found = self._by_capture
        parts = [part for index in indices for part in found.get(index, ())]
        return _last_of_each(*together(parts))


def _last_of_each(
    positions: NDArray[np.int32], rows: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """The last row of each position, by ascending position."""
    if (positions[1:] > positions[:-1]).all():
        return positions, rows[: len(positions)]
    kept, from_end = np.unique(positions[::-1], return_index=True)
    return kept, rows[len(positions) - 1 - from_end]
