"""The requests of a batch, kept from step to step: only what changes is worked out."""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from operator import ne
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eyesplice.fx_passes.program import Program
from eyesplice.ops.layout import PerRequest

_ALIGN: Final = 64
"""All rows of the copied table start on a 16-byte boundary, as Triton's kernels assume."""


class Column(IntEnum):
    """Rows of a batch's table: those of `PerRequest`, then what only the host needs.

    A request without a program has 0 in all of them. BEFORE, LAST and AFTER are its
    program's `CaptureBounds`.
    """

    ROW = PerRequest.ROW
    PROMPT_LEN = PerRequest.PROMPT_LEN
    SLOT = PerRequest.SLOT
    SCORES = PerRequest.SCORES
    FUNCTIONS = 4
    LOOKS_BACK = 5
    BEFORE = 6
    LAST = 7
    AFTER = 8


class Batch:
    """What stays the same while the same requests run.

    Attributes:
        serial: no other batch of this process has it.
        request_ids: in the runner's order.
        table: int32 `[len(Column), requests]`.
        per_request: int32 `[4, >= requests]` on the device, see `PerRequest`.
        place: each request that has a program, and its slot.
        first_slot: the lowest of these slots.
        errors: what some of the requests should know, such as why they run without effect.
        capturing: the programs with captures, by slot.
        functions: of the program that has most.
        collects: whether gates look at what earlier steps scored or latched.
        scored: the requests that have scores, by their place in the batch.
        scored_requests, scored_slots, scored_columns: of each its id, slot (int64) and
            how many scores; `most_scores` is the most of them.
        reads: whether a program has scores or captures.
    """

    def __init__(
        self,
        serial: int,
        request_ids: Sequence[str],
        table: NDArray[np.int32],
        errors: Mapping[str, str],
        program_of: Callable[[str], Program],
    ) -> None:
        """A batch whose table is not on the device yet."""
        self.serial = serial
        self.request_ids = request_ids
        self.table = table
        self.per_request: Tensor | None = None
        slots = table[Column.SLOT]
        self.place = {
            request: slot
            for request, slot in zip(request_ids, slots.tolist(), strict=True)
            if slot
        }
        self.first_slot = min(self.place.values(), default=0)
        self.errors = errors
        captures = table[[Column.BEFORE, Column.LAST, Column.AFTER]].any(axis=0)
        self.capturing = {
            int(slots[index]): program_of(request_ids[index])
            for index in np.flatnonzero(captures).tolist()
        }
        self.functions = int(table[Column.FUNCTIONS].max(initial=0))
        self.collects = bool(table[Column.LOOKS_BACK].any())
        self.scored = np.flatnonzero(table[Column.SCORES])
        self.scored_requests = [request_ids[place] for place in self.scored.tolist()]
        self.scored_slots = slots[self.scored].astype(np.int64)
        self.scored_columns = table[Column.SCORES, self.scored]
        self.most_scores = int(self.scored_columns.max(initial=0))
        self.reads = bool(self.capturing) or bool(self.scored_requests)


class Roster:
    """The batch of the last step, and what has changed since."""

    def __init__(self, max_requests: int) -> None:
        width = -(-max_requests // _ALIGN) * _ALIGN
        self._table = np.zeros((len(Column), width), dtype=np.int32)
        self._ids: list[str] = []
        self._stale: set[str] = set()
        self._serial = 0
        self._batch: Batch | None = None

    def touch(self, request_id: str) -> None:
        """What is known of a request has changed."""
        self._stale.add(request_id)

    def unchanged(self, request_ids: Sequence[str]) -> Batch | None:
        """The last batch, if it holds these requests and they are as they were."""
        if self._stale or list(request_ids) != self._ids:
            return None
        return self._batch

    def changed(self, request_ids: Sequence[str]) -> list[int]:
        """Places whose request is not the last batch's, or has been touched."""
        before, stale = self._ids, self._stale
        places = list(range(len(before), len(request_ids)))
        for place, differs in enumerate(map(ne, before, request_ids)):
            if differs or request_ids[place] in stale:
                places.append(place)
        return places

    def update(
        self,
        request_ids: Sequence[str],
        columns: Mapping[int, Sequence[int] | None],
        errors: Mapping[str, str],
        program_of: Callable[[str], Program],
    ) -> Batch:
        """Make these requests the batch.

        Args:
            request_ids: in the runner's order.
            columns: the values of each place in `changed`, in the order of `Column`;
                None for a request without a program.
            errors: what some of the requests should know.
            program_of: the program of a request that has one.
        """
        count = len(request_ids)
        for place, values in columns.items():
            self._table[:, place] = 0 if values is None else values
        self._table[:, count : len(self._ids)] = 0
        self._ids = list(request_ids)
        self._stale.clear()
        self._serial += 1
        self._batch = Batch(
            self._serial,
            self._ids,
            self._table[:, :count].copy(),
            errors,
            program_of,
        )
        return self._batch

    def columns_for_device(self) -> NDArray[np.int32]:
        """int32 `[4, width]`, the part of the table that the kernels read."""
        return self._table[: len(PerRequest)]
