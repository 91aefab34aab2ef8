"""The copies of one step's results; on a GPU they arrive later, in stream order."""

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyesplice.integration.buffers import Buffers
from eyesplice.integration.captures import Region
from eyesplice.ops.layout import LOG_WORDS, MAX_FUNCTIONS, SLOT_WORDS

_COUNT_WORDS: Final = 2 * MAX_FUNCTIONS
_IN_FLIGHT: Final = 3
"""Copies that are usually under way: the last step's, and two that are not handled."""

_HOST: Final = torch.device("cpu")


class StepCopies:
    """Copies one range of `Buffers.words` after each step, and what that takes, kept."""

    def __init__(self, buffers: Buffers, stream: torch.cuda.Stream | None) -> None:
        """No copy yet.

        Args:
            buffers: what the ops write.
            stream: does the copies, and nothing else; None on a CPU.
        """
        self.first: Final = buffers.first
        self.num_slots: Final = buffers.rows
        self.num_scores: Final = buffers.score.shape[1]
        self._words = buffers.words
        self._slots_end = self.first["slots"] + buffers.rows * SLOT_WORDS
        self._stream = stream
        self._ready = None if stream is None else torch.cuda.Event()
        self._arrived: list[_Arrival] = []
        if stream is not None:
            self._arrived += [self._arrival() for _ in range(_IN_FLIGHT)]
        self._range = (0, 0)
        self._view = self._words[:0]

    def start(self, first_slot: int, tokens: int, *, log: bool) -> "StepCopy":
        """Start a copy, after all that the current stream has to do.

        Args:
            first_slot: the lowest slot in use.
            tokens: tokens up to the last one that can have a score.
            log: whether anything may have been captured.
        """
        begin = self.first["counts"] + first_slot * _COUNT_WORDS
        if log:
            begin = self.first["capture_log"]
        end = self._slots_end
        if tokens:
            end = self.first["score"] + tokens * self.num_scores
        if self._range != (begin, end):
            self._range, self._view = (begin, end), self._words[begin:end]
        words, arrival = self._copy()
        return StepCopy(self, words, arrival, begin, first_slot, tokens)

    def _arrival(self) -> "_Arrival":
        # A blocking event sleeps instead of keeping the driver's lock busy.
        event = torch.cuda.Event(blocking=True)
        return _Arrival(_pinned(self._words.numel()), event)

    def _copy(self) -> tuple[Tensor, "_Arrival | None"]:
        if self._stream is None or self._ready is None:
            return self._view.clone(), None
        current = torch.cuda.current_stream()
        # Whoever waits for an event waits for its last recording before that.
        self._ready.record(current)
        self._ready.wait(self._stream)
        arrival = self._arrived.pop() if self._arrived else self._arrival()
        words = arrival.words[: self._view.numel()]
        torch.cuda.set_stream(self._stream)
        try:
            words.copy_(self._view, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)
        arrival.done.record(self._stream)
        return words, arrival

    def give_back(self, arrival: "_Arrival") -> None:
        """Let a later copy use what one that is read to its end arrived by.

        What still waits for the event by then waits for the later copy too: too long at
        worst, since all copies are on one stream.
        """
        self._arrived.append(arrival)


def _pinned(words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int32, pin_memory=True)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Where a copy arrives, and when.

    Kept from copy to copy: pinned memory is dear to allocate, and the driver does it while
    it does nothing else.
    """

    words: Tensor
    done: torch.cuda.Event


class StepCopy:
    """The copy after one step: what it counted, scored and logged.

    Attributes:
        first_slot: the slot of the first row of `counts` and `slots`.
    """

    __slots__ = (
        "_arrival",
        "_begin",
        "_copies",
        "_host",
        "_tokens",
        "_words",
        "first_slot",
    )

    def __init__(
        self,
        copies: StepCopies,
        words: Tensor,
        arrival: _Arrival | None,
        begin: int,
        first_slot: int,
        tokens: int,
    ) -> None:
        """A copy that was started; `words` are those from `begin` on."""
        self._arrival = arrival
        self.first_slot = first_slot
        self._copies = copies
        self._words = words
        self._host: NDArray[np.int32] | None = None
        self._begin = begin
        self._tokens = tokens

    @property
    def done(self) -> torch.cuda.Event | None:
        """When it has arrived; None on a CPU, and once it is released."""
        return None if self._arrival is None else self._arrival.done

    def wait(self) -> None:
        """Return once it has arrived."""
        if self.done is not None:
            _wait_for(self.done)

    def release(self) -> None:
        """Give back what it arrived by: nothing waits for it or reads it any more.

        The arrays that it gave are void from then on.
        """
        if self._arrival is not None:
            self._copies.give_back(self._arrival)
            self._arrival = None

    @property
    def counts(self) -> NDArray[np.int32]:
        """`[slots, 2, MAX_FUNCTIONS]`, from `first_slot` on."""
        first = self._copies.first["counts"] + self.first_slot * _COUNT_WORDS
        rows = self._copies.num_slots - self.first_slot
        return self._part(first, rows, _COUNT_WORDS).reshape(-1, 2, MAX_FUNCTIONS)

    @property
    def slots(self) -> NDArray[np.int32]:
        """`[slots, SLOT_WORDS]`, from `first_slot` on."""
        first = self._copies.first["slots"] + self.first_slot * SLOT_WORDS
        rows = self._copies.num_slots - self.first_slot
        return self._part(first, rows, SLOT_WORDS)

    @property
    def score(self) -> NDArray[np.float32]:
        """`[tokens, scores]`, up to the last token that can have one."""
        first, width = self._copies.first["score"], self._copies.num_scores
        return self._part(first, self._tokens, width).view(np.float32)

    @property
    def log(self) -> NDArray[np.int32]:
        """`[1 + capture rows, LOG_WORDS]` of a step that may have captured."""
        first = self._copies.first["capture_log"]
        rows = (self._copies.first["counts"] - first) // LOG_WORDS
        return self._part(first, rows, LOG_WORDS)

    def _part(self, first: int, rows: int, width: int) -> NDArray[np.int32]:
        begin = first - self._begin
        if self._host is None:
            self._host = self._words.numpy()
        return self._host[begin : begin + rows * width].reshape(rows, width)


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
            _wait_for(self._done)
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
            rows = self._capture[start : start + count]
            self._rows, self._done = _copy_out(rows, self._stream)
        return self._rows


def _wait_for(event: torch.cuda.Event) -> None:
    """Return once an event has passed.

    One that has is only looked at. To wait gives up the interpreter's lock, also for
    nothing, and the thread that prepares the next step may keep it for 5 ms.
    """
    if not event.query():
        event.synchronize()


def _copy_out(
    tensor: Tensor, stream: torch.cuda.Stream | None
) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, pinned where it is not waited for, and when it is there.

    Args:
        tensor: contiguous.
        stream: does the copy; None on a CPU.
    """
    if stream is None:
        return tensor.clone(), None
    # Maybe in a thread that another device is current in.
    with torch.cuda.stream(stream):
        copy = tensor.to(_HOST, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return copy, done
