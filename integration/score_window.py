"""Scores on their way to each request's answer, gathered for many tokens at a time."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from eyesplice.integration.raw_answers import StepScores

_ROOM: Final = 64
"""Tokens of a request that wait."""

Take = Callable[[str, NDArray[np.int32], NDArray[np.float32]], None]
"""Receives a request, and positions `[tokens]` and rows `[tokens, scores]` of it."""


class ScoreWindow:
    """The last few tokens of each request that were not handed on yet.

    A step of decoding adds a token to every request at once. A request's tokens are
    handed on together when its room is full, when it has several in a step, and when
    they are asked for.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._owner: dict[int, str] = {}
        self._slot: dict[str, int] = {}
        self._serial = -1
        self._rows = np.zeros((0, _ROOM, 0), dtype=np.float32)
        self._positions = np.zeros((0, _ROOM), dtype=np.int32)
        self._filled = np.zeros(0, dtype=np.int64)
        self._columns = np.zeros(0, dtype=np.int64)

    def add(self, serial: int, scores: StepScores) -> None:
        """Take a step's scores.

        Args:
            serial: that of the step.
            scores: of every request that has any.
        """
        if serial != self._serial:
            self._meet(scores)
            self._serial = serial
        single = scores.lengths == 1
        slots = scores.slots[single]
        for slot in slots[self._filled[slots] == _ROOM].tolist():
            self._hand_on(slot)
        at = self._filled[slots]
        rows = scores.rows[scores.first_row[single]]
        self._rows[slots, at, : rows.shape[1]] = rows
        self._positions[slots, at] = scores.first_position[single]
        self._filled[slots] = at + 1
        for place in np.flatnonzero(scores.lengths > 1).tolist():
            self._hand_on(int(scores.slots[place]))
            first, of_chunk = scores.of(place)
            positions = np.arange(first, first + len(of_chunk), dtype=np.int32)
            self._take(scores.requests[place], positions, of_chunk)

    def flush(self, request_id: str) -> None:
        """Hand on what waits of a request."""
        slot = self._slot.get(request_id)
        if slot is not None:
            self._hand_on(slot)

    def forget(self, request_id: str) -> None:
        """Drop what waits of a request."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            del self._owner[slot]
            self._filled[slot] = 0

    def _hand_on(self, slot: int) -> None:
        filled = int(self._filled[slot])
        if filled and slot in self._owner:
            rows = self._rows[slot, :filled, : self._columns[slot]]
            self._take(self._owner[slot], self._positions[slot, :filled], rows)
        self._filled[slot] = 0

    def _meet(self, scores: StepScores) -> None:
        """Make the step's requests the owners of their slots."""
        self._grow(int(scores.slots.max()) + 1, scores.rows.shape[1])
        for request, slot in zip(scores.requests, scores.slots.tolist(), strict=True):
            owner = self._owner.get(slot)
            if owner == request:
                continue
            if owner is not None:
                self._hand_on(slot)
                del self._slot[owner]
            # A preempted request comes back in another slot.
            before = self._slot.get(request)
            if before is not None:
                self._hand_on(before)
                del self._owner[before]
            self._owner[slot], self._slot[request] = request, slot
            self._filled[slot] = 0
        self._columns[scores.slots] = scores.columns

    def _grow(self, slots: int, columns: int) -> None:
        have = self._rows.shape
        if slots <= have[0] and columns <= have[2]:
            return
        slots, columns = max(slots, have[0]), max(columns, have[2])
        rows = np.full((slots, _ROOM, columns), np.nan, dtype=np.float32)
        rows[: have[0], :, : have[2]] = self._rows
        self._rows = rows
        more = slots - have[0]
        self._positions = np.pad(self._positions, ((0, more), (0, 0)))
        self._filled = np.pad(self._filled, (0, more))
        self._columns = np.pad(self._columns, (0, more))
