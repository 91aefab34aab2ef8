"""Brings what the ops found out to the host, without holding the device up.

After the forward pass of a step the results of its requests are copied on a stream of
their own; the host waits for the copies when it handles the step's output, and the next
step's ops, before they overwrite what is copied, wait on the device. A batch without a
request that has a program copies nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.sites import Submodule
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.captures import CaptureRing, Region
from eyesplice.integration.raw_answers import Captured, StepAnswer
from eyesplice.ops import contracts
from eyesplice.ops.layout import LogHead, LogRow, Slot


@dataclass(frozen=True, slots=True)
class Member:
    """A request of a batch that has a program: its place in the batch, and its slot."""

    request_id: str
    index: int
    slot: int
    program: Program


class Batch:
    """What stays the same while the same requests run.

    Attributes:
        request_ids: in the runner's order.
        per_request: int32 `[4, >= requests]` on the device, see `PerRequest`.
        members: the requests that have a program.
        errors: why others run without effect.
        collects: whether gates look at what earlier steps scored or latched.
        reads: whether a program has scores or captures.
    """

    def __init__(
        self,
        request_ids: tuple[str, ...],
        per_request: Tensor,
        members: Sequence[Member],
        errors: Mapping[str, str],
    ) -> None:
        self.request_ids = request_ids
        self.per_request = per_request
        self.members = tuple(members)
        self.errors = errors
        programs = [member.program for member in members]
        self.collects = any(map(_looks_back, programs))
        self.reads = any(p.scores or p.captures for p in programs)


def _looks_back(program: Program) -> bool:
    return bool(program.latched) or any(score.scope for score in program.scores)


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was routed.

    Attributes:
        batch: its requests.
        lengths: tokens of each request of the batch; empty when nothing is read.
        region: the rows of `capture` that it may fill.
        query_start_loc, positions: as in `Router.step`.
    """

    batch: Batch
    lengths: Sequence[int]
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
        self._dtype = str(buffers.capture.dtype).removeprefix("torch.")
        self._on_cuda = buffers.device.type == "cuda"
        self._stream = torch.cuda.Stream(buffers.device) if self._on_cuda else None
        self._copied: torch.cuda.Event | None = None

    def before_step(self) -> None:
        """Let the ops of the step wait until the last step's results are copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def region(self, batch: Batch, lengths: Sequence[int]) -> Region:
        """The rows of `capture` for a step of the batch."""
        return self._ring.region(
            sum(lengths[m.index] * len(m.program.captures) for m in batch.members)
        )

    def launch(self, step: Step) -> Pending | None:
        """Start to copy a step's results; called once its forward pass is launched.

        Returns:
            The results, None when there is nothing to answer.
        """
        batch = step.batch
        if batch.collects:
            self.collect(step)
        if not self._answers or not (batch.members or batch.errors):
            return None
        if self._stream is None:
            copies = _Copies(self._buffers, step)
            copies.captures()
            return Pending(lambda: self._order(step, copies))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = _Copies(self._buffers, step)
            self._copied = done = self._recorded()
            if step.region.rows:
                copies.captures()
                done = self._recorded()
                self._ring.copying(step.region, lambda: _wait_for(done))

        def finish() -> StepAnswer:
            done.synchronize()
            return self._order(step, copies)

        return Pending(finish)

    def collect(self, step: Step) -> None:
        """Take scores and latches over to the step after this one."""
        contracts.collect_(
            self._buffers.work,
            self._buffers.select,
            self._buffers.reads,
            step.batch.per_request,
            step.query_start_loc,
            step.positions,
            len(step.batch.request_ids),
        )

    def _recorded(self) -> torch.cuda.Event:
        # A blocking event sleeps instead of keeping the driver's lock busy.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def _order(self, step: Step, copies: "_Copies") -> StepAnswer:
        members = step.batch.members
        slots = copies.slots.numpy()
        return StepAnswer(
            place={member.request_id: member.slot for member in members},
            counts=copies.counts.numpy(),
            lost=slots[:, Slot.LOST],
            scores={
                member.request_id: (
                    int(slots[member.slot, Slot.FIRST_POSITION]),
                    _score_rows(copies, step, member),
                )
                for member in members
                if member.program.scores and step.lengths[member.index]
            },
            captures=self._captured(step, copies) if step.region.rows else {},
            errors=step.batch.errors,
            dtype=self._dtype,
            widths=self._widths,
        )

    def _captured(
        self, step: Step, copies: "_Copies"
    ) -> dict[str, dict[int, Captured]]:
        asked = int(copies.head[LogHead.COUNT])
        log = copies.log[: min(asked, step.region.rows)].numpy()
        rows = copies.rows.view(torch.uint8).numpy()
        width = self._buffers.capture.element_size()
        found: dict[str, dict[int, Captured]] = {}
        for member in step.batch.members:
            of_request = log[:, LogRow.SLOT] == member.slot
            for index, info in enumerate(member.program.captures):
                (mine,) = np.nonzero(of_request & (log[:, LogRow.CAPTURE] == index))
                if len(mine):
                    size = self._widths[info.site.submodule] * width
                    found.setdefault(member.request_id, {})[index] = (
                        log[mine, LogRow.POSITION],
                        rows[mine, :size],
                    )
        return found


class _Copies:
    """Copies of one step's results; on a GPU they arrive later, in stream order."""

    def __init__(self, buffers: Buffers, step: Step) -> None:
        self._buffers, self._region = buffers, step.region
        members = step.batch.members
        slots = 1 + max((member.slot for member in members), default=0)
        functions = max((len(m.program.functions) for m in members), default=0)
        self.slots = _to_host(buffers.slots[:slots])
        self.counts = _to_host(buffers.counts[:slots, :, :functions])
        self.starts = np.cumsum([0, *step.lengths]).tolist()
        scored = [m for m in members if m.program.scores]
        if scored:
            self.first = min(self.starts[m.index] for m in scored)
            last = max(self.starts[m.index + 1] for m in scored)
            columns = max(len(m.program.scores) for m in scored)
            self.score = _to_host(buffers.score[self.first : last, :columns])
        if step.region.rows:
            self.head = _to_host(buffers.capture_log[0])

    def captures(self) -> None:
        """Copy the captured rows, and the log that says whose they are."""
        if self._region.rows:
            start, stop = self._region.start, self._region.start + self._region.rows
            self.rows = _to_host(self._buffers.capture[start:stop])
            self.log = _to_host(self._buffers.capture_log[1 + start : 1 + stop])


def _score_rows(copies: _Copies, step: Step, member: Member) -> np.ndarray:
    start = copies.starts[member.index] - copies.first
    stop = start + step.lengths[member.index]
    rows: np.ndarray = copies.score[start:stop, : len(member.program.scores)].numpy()
    return rows


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, in pinned memory where the copy is not waited for."""
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous().to("cpu", non_blocking=True)


def _wait_for(event: torch.cuda.Event) -> None:
    torch.cuda.current_stream().wait_event(event)
