"""Slots: where the state of each request with a program lies on the device."""

import heapq

from eyesplice.integration.buffers import Buffers
from eyesplice.integration.programs import to_device


class Slots:
    """Hands out the rows of `slots`, `counts` and `carry`; row 0 belongs to nobody.

    A request has a slot from its admission until it ends or is preempted. A scheduler
    never runs more requests than a batch can hold, and says which ones ended before it
    names new ones, so there is a slot for each.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._state = (buffers.slots, buffers.counts, buffers.carry)
        # The lowest free one first: what is copied to the host is the rows up to the
        # highest one in use.
        self._free = list(range(1, buffers.slots.shape[0]))
        self._slot: dict[str, int] = {}
        self._fresh: set[int] = set()

    def take(self, request_id: str) -> None:
        """Give the request a slot, empty from the next `clear_fresh` on."""
        self.release(request_id)
        assert self._free, "more requests run than max_num_seqs"
        slot = heapq.heappop(self._free)
        self._slot[request_id] = slot
        self._fresh.add(slot)

    def release(self, request_id: str) -> None:
        """Take the request's slot back, if it has one."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            heapq.heappush(self._free, slot)

    def of(self, request_id: str) -> int:
        """The request's slot, 0 if it has none."""
        return self._slot.get(request_id, 0)

    def clear_fresh(self) -> None:
        """Zero, in stream order, the state of all slots that were taken since."""
        if not self._fresh:
            return
        rows = to_device(sorted(self._fresh), self._state[0].device)
        for tensor in self._state:
            tensor.index_fill_(0, rows, 0)
        self._fresh.clear()
