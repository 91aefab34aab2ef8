"""Brings what the ops found out to the host, without holding the device up.

After the forward pass of a step one copy brings the receipts and scores of its requests,
on a stream of its own; the host waits for it when it handles the step's output, and the
next step's ops, before they overwrite what is copied, wait on the device. Captured rows
follow once that copy has told how many there are. A batch without a request that has a
program copies nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.sites import Submodule
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.captured import Captured
from eyesplice.integration.captures import NO_ROWS, CaptureRing, Region
from eyesplice.integration.copies import CapturedRows, StepCopies, StepCopy
from eyesplice.integration.raw_answers import StepAnswer, StepScores
from eyesplice.integration.roster import Batch, Column
from eyesplice.ops import contracts
from eyesplice.ops.layout import LogHead, LogRow, Slot

_LARGE: Final = 1 << 22
"""Bytes from which more threads than one copy faster."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was routed.

    Attributes:
        batch: its requests.
        lengths: int64 `[requests]`, tokens of each; empty when nothing is read.
        region: the rows of `capture` that it may fill.
        query_start_loc, positions: as in `Router.step`.
    """

    batch: Batch
    lengths: NDArray[np.int64]
    region: Region
    query_start_loc: Tensor
    positions: Tensor


class Pending:
    """The results of one step, on their way to the host."""

    def __init__(self, finish: Callable[[], StepAnswer]) -> None:
        self._finish = finish

    def join(self) -> StepAnswer:
        """Wait for the copies and put the results in order."""
        return self._finish()


class Results:
    """Collects one engine's results, step by step."""

    def __init__(
        self,
        buffers: Buffers,
        widths: Mapping[Submodule, int],
        *,
        answers: bool = True,
    ) -> None:
        """Results for the host.

        Args:
            buffers: what the ops write.
            widths: elements per token at each submodule.
            answers: whether this process gives the answers; one rank of each group does.
        """
        self._buffers = buffers
        self._widths = {str(submodule): size for submodule, size in widths.items()}
        self._answers = answers
        self._ring = CaptureRing(buffers.capture.shape[0])
        self._captured_serial = -1
        self._position = np.zeros(buffers.rows, dtype=np.int64)
        self._dtype = str(buffers.capture.dtype).removeprefix("torch.")
        on_cuda = buffers.device.type == "cuda"
        # Rows that a step's count asks for must not wait behind the next step's copy.
        of_steps, self._row_stream = (
            torch.cuda.Stream(buffers.device) if on_cuda else None for _ in range(2)
        )
        self._copies = StepCopies(buffers, of_steps)
        self._copied: torch.cuda.Event | None = None
        self._work = buffers.work

    def before_step(self) -> None:
        """Let the ops of the step wait until the last step's results are copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def begin_at(self, positions: Mapping[int, int]) -> None:
        """Note the first position that a new request computes, by slot."""
        self._position[list(positions)] = list(positions.values())

    def region(self, batch: Batch, lengths: NDArray[np.int64]) -> Region:
        """The rows of `capture` for a step of the batch."""
        if not batch.capturing or batch.serial == self._captured_serial:
            return NO_ROWS
        table = batch.table
        slots, prompt = table[Column.SLOT], table[Column.PROMPT_LEN]
        begin = self._position[slots]
        # Drafts that are rejected are counted too, but a prompt has none: up to its end,
        # which is all that matters here, the count of a request's tokens is exact.
        self._position[slots] = end = begin + lengths
        before = np.clip(prompt - 1, begin, end) - begin
        after = end - np.clip(prompt, begin, end)
        bound = (
            before @ table[Column.BEFORE]
            + (lengths - before - after) @ table[Column.LAST]
            + after @ table[Column.AFTER]
        )
        of_prompts = (table[Column.BEFORE] + table[Column.LAST])[begin < prompt]
        if not (of_prompts.any() or table[Column.AFTER].any()):
            # Only prompts are captured, and all of them are over.
            self._captured_serial = batch.serial
        return self._ring.region(int(bound))

    def launch(self, step: Step) -> Pending | None:
        """Start to copy a step's results; called once its forward pass is launched.

        Returns:
            The results, None when there is nothing to answer.
        """
        batch = step.batch
        if batch.collects:
            self.collect(step)
        if not self._answers or not (batch.place or batch.errors):
            return None
        if not batch.place:
            return Pending(lambda: self._refusals(batch))
        copies = self._copies.start(
            batch.first_slot, _last_scored(step), log=step.region.rows > 0
        )
        self._copied = copies.done
        rows = None
        if step.region.rows:
            rows = CapturedRows(
                self._buffers.capture, step.region, self._row_stream, copies.done
            )
            self._ring.copying(step.region, rows.make_way)
        return Pending(lambda: self._order(step, copies, rows))

    def collect(self, step: Step) -> None:
        """Take scores and latches over to the step after this one."""
        contracts.collect_(
            self._work,
            self._buffers.select,
            self._buffers.reads,
            step.batch.per_request,
            step.query_start_loc,
            step.positions,
            len(step.batch.request_ids),
        )

    def _refusals(self, batch: Batch) -> StepAnswer:
        return StepAnswer(
            serial=batch.serial,
            place={},
            first_slot=0,
            counts=np.zeros((0, 2, 0), dtype=np.int32),
            lost=np.zeros(0, dtype=np.int32),
            scores=None,
            captures={},
            errors=batch.errors,
            dtype=self._dtype,
            widths=self._widths,
        )

    def _order(
        self, step: Step, copies: StepCopy, rows: CapturedRows | None
    ) -> StepAnswer:
        copies.wait()
        batch = step.batch
        answer = StepAnswer(
            serial=batch.serial,
            place=batch.place,
            first_slot=copies.first_slot,
            counts=copies.counts[:, :, : batch.functions].copy(),
            lost=copies.slots[:, Slot.LOST].copy(),
            scores=_scores(step, copies) if len(batch.scored) else None,
            captures={} if rows is None else self._captured(step, copies, rows),
            errors=batch.errors,
            dtype=self._dtype,
            widths=self._widths,
        )
        # The captured rows, which wait for it as well, are here by now, and all that the
        # answer holds is its own.
        copies.release()
        return answer

    def _captured(
        self, step: Step, copies: StepCopy, copied: CapturedRows
    ) -> dict[str, list[Captured]]:
        count = min(int(copies.log[0, LogHead.COUNT]), step.region.rows)
        rows = copied.fetch(count)
        if not count:
            return {}
        start = 1 + step.region.start
        log = copies.log[start : start + count]
        # Stable, and of ints: the rows of one capture of one request stay in order.
        key = log[:, LogRow.SLOT].astype(np.int64) << 32 | log[:, LogRow.CAPTURE]
        order = np.argsort(key, kind="stable")
        slots = log[order, LogRow.SLOT]
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        of_slot = {slot: request for request, slot in step.batch.place.items()}
        found: dict[str, list[Captured]] = {}
        for slot, chosen in zip(
            slots[starts].tolist(), np.split(order, starts[1:]), strict=True
        ):
            sizes = self._row_bytes(step.batch.capturing[slot])
            found[of_slot[slot]] = list(_chunks(log, rows, chosen, sizes))
        return found

    def _row_bytes(self, program: Program) -> list[int]:
        """Bytes of a row of each capture."""
        size = self._buffers.capture.itemsize
        return [self._widths[c.site.submodule] * size for c in program.captures]


def _chunks(
    log: NDArray[np.int32],
    rows: NDArray[np.uint8],
    chosen: NDArray[np.int64],
    sizes: Sequence[int],
) -> Iterator[Captured]:
    """One request's rows, together where they are as long.

    Args:
        log: `[rows, LOG_WORDS]`.
        rows: `[rows, bytes]`.
        chosen: the request's rows, by capture.
        sizes: bytes of a row of each capture.
    """
    lengths = set(sizes)
    of_rows = np.array(sizes)[log[chosen, LogRow.CAPTURE]] if len(lengths) > 1 else None
    for size in lengths:
        here = chosen if of_rows is None else chosen[of_rows == size]
        if len(here):
            captures, positions = log[here, LogRow.CAPTURE], log[here, LogRow.POSITION]
            yield Captured(captures, positions, _taken(rows[:, :size], here))


def _taken(rows: NDArray[np.uint8], chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
    """A copy of the chosen rows `[chosen, bytes]`, by torch's threads if it is large."""
    size = rows.shape[1]
    if len(chosen) * size < _LARGE:
        return rows[chosen]
    # Memory of numpy's, which comes in huge pages.
    found = np.empty((len(chosen), size), dtype=np.uint8)
    out = torch.from_numpy(found)
    torch.index_select(torch.from_numpy(rows), 0, torch.from_numpy(chosen), out=out)
    return found


def _last_scored(step: Step) -> int:
    """Tokens up to the last one that can have a score."""
    scored = step.batch.scored
    return int(step.lengths[: scored[-1] + 1].sum()) if len(scored) else 0


def _scores(step: Step, copies: StepCopy) -> StepScores:
    batch, scored = step.batch, step.batch.scored
    lengths = step.lengths[scored]
    return StepScores(
        requests=batch.scored_requests,
        slots=batch.scored_slots,
        columns=batch.scored_columns,
        first_position=copies.slots[
            batch.scored_slots - copies.first_slot, Slot.FIRST_POSITION
        ],
        first_row=np.cumsum(step.lengths)[scored] - lengths,
        lengths=lengths,
        rows=copies.score[:, : batch.most_scores].copy(),
    )
