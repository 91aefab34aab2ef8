"""Slots: where the state of each request with a program lies on the device."""

import heapq
from typing import Final

from eyesplice.integration.buffers import Buffers
from eyesplice.integration.uploads import Uploads

_STATE: Final = ("slots", "counts", "carry")


class Slots:
    """Hands out the rows of `slots`, `counts` and `carry`; row 0 belongs to nobody.

    A request has a slot from its admission until it ends or is preempted. A scheduler
    never runs more requests than a batch can hold, and says which ones ended before it
    names new ones, so there is a slot for each.
    """

    def __init__(self, buffers: Buffers, uploads: Uploads) -> None:
        self._uploads = uploads
        self._empty = uploads.blocks((name, 0, None) for name in _STATE)
        # The highest free one first: what is copied to the host begins with the lowest
        # row in use.
        self._free = [-slot for slot in range(buffers.rows - 1, 0, -1)]
        self._slot: dict[str, int] = {}
        self._fresh: dict[int, int] = {}

    def take(self, request_id: str, position: int = 0) -> int:
        """Give the request a slot, empty from the next `clear_fresh` on.

        Args:
            request_id: the runner's own id.
            position: of the first token that it computes.
        """
        self.release(request_id)
        assert self._free, "more requests run than max_num_seqs"
        slot = -heapq.heappop(self._free)
        self._slot[request_id] = slot
        self._fresh[slot] = position
        return slot

    def release(self, request_id: str) -> None:
        """Take the request's slot back, if it has one."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            heapq.heappush(self._free, -slot)

    def of(self, request_id: str) -> int:
        """The request's slot, 0 if it has none."""
        return self._slot.get(request_id, 0)

    def clear_fresh(self) -> dict[int, int]:
        """Empty all slots that were taken since, with the next upload.

        Returns:
            The first position of the request in each of them.
        """
        fresh, self._fresh = self._fresh, {}
        for slot in fresh:
            self._uploads.put(self._empty, slot)
        return fresh
