"""Which rows of `capture` a step may fill, while the host still copies earlier ones.

The buffer is used in two halves in turn: a copy of one step overlaps with the step
after it. A step that may need more rows than a half has gets the whole buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Region:
    """Rows `[start, start + limit)` of `capture`, for one step.

    Attributes:
        start: the first row.
        limit: rows that the step may fill; what does not fit is counted as lost.
        bound: rows that it can fill at most, from what it was asked for.
    """

    start: int = 0
    limit: int = 0
    bound: int = 0

    @property
    def rows(self) -> int:
        """Rows that may hold something after the step."""
        return min(self.limit, self.bound)


NO_ROWS: Final = Region()
"""For a step that captures nothing."""


class CaptureRing:
    """Hands the regions out, and makes each step wait for the copies of its region."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._half = num_rows // 2
        self._next = 0
        self._waits: list[Callable[[], None] | None] = [None, None]

    def region(self, bound: int) -> Region:
        """The rows for a step that can capture `bound` rows at most."""
        if bound <= 0:
            return NO_ROWS
        if bound > self._half:
            self._wait(0)
            self._wait(1)
            return Region(0, self._num_rows, bound)
        half = self._next
        self._next = 1 - half
        self._wait(half)
        return Region(half * self._half, self._half, bound)

    def copying(self, region: Region, wait: Callable[[], None]) -> None:
        """Note that the region is being copied; `wait` orders later work after it."""
        for half in (0, 1):
            begins = half * self._half
            ends = self._half if half == 0 else self._num_rows
            if (
                region.rows
                and region.start < ends
                and region.start + region.limit > begins
            ):
                self._waits[half] = wait

    def _wait(self, half: int) -> None:
        wait, self._waits[half] = self._waits[half], None
        if wait is not None:
            wait()
