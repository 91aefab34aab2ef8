"""The copies of one step's results; on a GPU they arrive later, in stream order."""

import threading
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyesplice.integration.buffers import Buffers
from eyesplice.integration.captures import Region
from eyesplice.ops.layout import LOG_WORDS, MAX_FUNCTIONS, SLOT_WORDS

_COUNT_WORDS: Final = 2 * MAX_FUNCTIONS


class StepCopy:
    """One range of `Buffers.words`: what a step counted, scored and logged.

    Attributes:
        done: when it has arrived; None on a CPU.
        first_slot: the slot of the first row of `counts` and `slots`.
    """

    def __init__(
        self,
        buffers: Buffers,
        first_slot: int,
        tokens: int,
        stream: torch.cuda.Stream | None,
        *,
        log: bool,
    ) -> None:
        """Start the copy, after all that the current stream has to do.

        Args:
            buffers: what the ops wrote.
            first_slot: the lowest slot in use.
            tokens: tokens up to the last one that can have a score.
            stream: does the copy; None on a CPU.
            log: whether anything may have been captured.
        """
        self.first_slot = first_slot
        self._first = buffers.first
        self._num_slots = buffers.rows - self.first_slot
        self._num_scores = buffers.score.shape[1]
        self._tokens = tokens
        begin = buffers.first["counts"] + first_slot * _COUNT_WORDS
        if log:
            begin = buffers.first["capture_log"]
        end = buffers.first["slots"] + buffers.rows * SLOT_WORDS
        if tokens:
            end = buffers.first["score"] + tokens * self._num_scores
        self._begin = begin
        self._words, self.done = copy_out(buffers.words[begin:end], stream)

    def wait(self) -> None:
        """Return once it has arrived."""
        if self.done is not None:
            self.done.synchronize()

    @property
    def counts(self) -> NDArray[np.int32]:
        """`[slots, 2, MAX_FUNCTIONS]`, from `first_slot` on."""
        first = self._first["counts"] + self.first_slot * _COUNT_WORDS
        return self._part(first, self._num_slots, _COUNT_WORDS).reshape(
            -1, 2, MAX_FUNCTIONS
        )

    @property
    def slots(self) -> NDArray[np.int32]:
        """`[slots, SLOT_WORDS]`, from `first_slot` on."""
        first = self._first["slots"] + self.first_slot * SLOT_WORDS
        return self._part(first, self._num_slots, SLOT_WORDS)

    @property
    def score(self) -> NDArray[np.float32]:
        """`[tokens, scores]`, up to the last token that can have one."""
        words = self._part(self._first["score"], self._tokens, self._num_scores)
        return words.view(np.float32)

    @property
    def log(self) -> NDArray[np.int32]:
        """`[1 + capture rows, LOG_WORDS]` of a step that may have captured."""
        first = self._first["capture_log"]
        rows = (self._first["counts"] - first) // LOG_WORDS
        return self._part(first, rows, LOG_WORDS)

    def _part(self, first: int, rows: int, width: int) -> NDArray[np.int32]:
        begin = first - self._begin
        host: NDArray[np.int32] = self._words.numpy()
        return host[begin : begin + rows * width].reshape(rows, width)


class CapturedRows:
    """The rows that a step captured: copied once it is known how many they are.

    If their place is needed before, all that there may be are copied.
    """

    def __init__(
        self,
        capture: Tensor,
        region: Region,
        stream: torch.cuda.Stream | None,
        captured: torch.cuda.Event | None,
    ) -> None:
        """Rows to come.

        Args:
            capture: as in `layout`.
            region: those of the step.
            stream: for the copy; None on a CPU.
            captured: recorded after the step's forward pass.
        """
        self._capture = capture
        self._region = region
        self._stream = stream
        self._captured = captured
        # Outputs may be handled by another thread than the one that launches steps.
        self._lock = threading.Lock()
        self._rows: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def fetch(self, count: int) -> NDArray[np.uint8]:
        """The bytes `[count, bytes per row]` of the first rows; waits for them."""
        with self._lock:
            rows = self._copied(count)
        if self._done is not None:
            self._done.synchronize()
        found: NDArray[np.uint8] = rows[:count].view(torch.uint8).numpy()
        return found

    def make_way(self) -> None:
        """Let the current stream wait until the rows may be overwritten."""
        with self._lock:
            self._copied(self._region.rows)
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def _copied(self, count: int) -> Tensor:
        if self._rows is None:
            start = self._region.start
            if self._stream is not None and self._captured is not None:
                self._stream.wait_event(self._captured)
            self._rows, self._done = copy_out(
                self._capture[start : start + count], self._stream, wait=False
            )
        return self._rows


def copy_out(
    tensor: Tensor, stream: torch.cuda.Stream | None, *, wait: bool = True
) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, pinned where it is not waited for, and when it is there.

    Args:
        tensor: contiguous.
        stream: does the copy; None on a CPU.
        wait: for what the current stream has to do.
    """
    if stream is None:
        return tensor.clone(), None
    if wait:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy = tensor.to("cpu", non_blocking=True)
        # A blocking event sleeps instead of keeping the driver's lock busy.
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return copy, done
