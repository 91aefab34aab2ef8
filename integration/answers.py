"""What the front end knows of the requests whose answers it owes.

remember    when a request is admitted, by the id that the client gave it
admit       when it goes to the engine core, by the id that it has there
receive     when results arrive from there
forget      when it has ended
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.request import Request
from eyesplice.integration.answer_body import Asked, body, new_scores
from eyesplice.integration.config import KEY
from eyesplice.integration.raw_answers import RawAnswer

_MAX_UNSENT: Final = 65536
"""Admitted requests that may wait to go to the engine core. One that never goes leaves
its entry behind, until as many others have come."""

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(slots=True)
class Record:
    """One request that runs: what it asked for, and what it found out.

    Attributes:
        asked: what it asked for.
        raw: what it found out so far.
        new: what it found out since scores were given, where they are streamed.
        received: whether anything has arrived.
        last_given: the last position whose scores were given.
    """

    asked: Asked
    raw: RawAnswer = field(default_factory=RawAnswer)
    new: RawAnswer = field(default_factory=RawAnswer)
    received: bool = False
    last_given: int = -1

    def receive(self, plain: Mapping[str, Any]) -> None:
        """Add what arrived from the engine core."""
        self.raw.add_plain(plain)
        if self.asked.stream_scores:
            self.new.add_plain(plain)
        self.received = True

    def answer(self, *, finished: bool, delta: bool) -> dict[str, Any] | None:
        """The answer for an output of the request.

        Args:
            finished: whether it is the last one.
            delta: whether outputs hold what is new since the one before, and not
                everything so far. Then scores do too, if the client wants them as they
                come.

        Returns:
            None for an output that has none.
        """
        streams = self.asked.stream_scores
        if not (finished or streams):
            return None
        since = self.last_given if delta and streams else -1
        self.last_given = max(self.last_given, self.new.last_position())
        new, self.new = self.new, RawAnswer()
        if finished:
            return body(self.asked, self.raw if self.received else None, since)
        return new_scores(self.asked, new if delta else self.raw, since)


_lock = threading.Lock()
_admitted: OrderedDict[tuple[str, str | None], Asked] = OrderedDict()
_running: dict[str, Record] = {}


def remember(
    request_id: str,
    program: Program | None,
    request: Request | None = None,
    error: str | None = None,
    vectors: Mapping[str, str] = _NONE,
    *,
    text: str | None = None,
) -> None:
    """Note what a request asks for.

    Args:
        request_id: the id that the client knows it by.
        program: what it does; None when it is served without effect.
        request: the parsed request.
        error: why it is served without effect.
        vectors: digests of the registered vectors that it names itself.
        text: the canonical one, which goes to the worker.
    """
    asked = Asked(
        program=program,
        vectors=vectors,
        apps=request.apps if request is not None else (),
        stream_scores=request is not None and request.stream_scores,
        error=error,
    )
    with _lock:
        _admitted[request_id, text] = asked
        _admitted.move_to_end((request_id, text))
        while len(_admitted) > _MAX_UNSENT:
            _admitted.popitem(last=False)


def admit(request: Any, *, keep: bool = False) -> None:
    """A request goes to the engine core.

    Args:
        request: the `EngineCoreRequest`, with the ids of the core and of the client.
        keep: whether more of them follow for the same request of the client.
    """
    if not _admitted:
        return
    params = request.sampling_params
    text = (params.extra_args or {}).get(KEY) if params is not None else None
    key = (request.external_req_id or request.request_id, text)
    with _lock:
        asked = _admitted.get(key) if keep else _admitted.pop(key, None)
        if asked is not None and request.request_id not in _running:
            asked = asked.for_prompt(request)
            _running[request.request_id] = Record(asked)


def record_of(request_id: str) -> Record | None:
    """The running request of this id of the engine core, None if it asked for nothing."""
    return _running.get(request_id)


def receive(request_id: str, plain: Mapping[str, Any]) -> None:
    """Results of a request arrived, see `RawAnswer.to_plain`."""
    record = _running.get(request_id)
    if record is not None:
        record.receive(plain)


def forget(request_id: str) -> None:
    """A request ended; unknown ids are fine."""
    _running.pop(request_id, None)


def owed() -> int:
    """Requests whose answers are not complete."""
    return len(_running)
