"""Tells the ops what each token of a step has to do at each boundary.

Called by the runners' wrappers in stream order, before the forward pass of each step.
With no request in the engine that has a program, and clean maps, it does nothing at all.
A step of the same requests as the last costs one launch; when requests come or go, one
copy brings all that changed, and a launch puts new programs and empty state in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyesplice.fx_passes.program import Program
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.captures import Region
from eyesplice.integration.prepared import Prepared
from eyesplice.integration.programs import ProgramRows
from eyesplice.integration.results import Results, Step
from eyesplice.integration.roster import Batch, Roster
from eyesplice.integration.slots import Slots
from eyesplice.integration.uploads import Uploads
from eyesplice.ops import contracts

_PARTIAL: Final = (
    "preempted, and resumed from cached keys and values: the counts leave out the first "
    "{} tokens, and gates did not see them again"
)

_NO_LENGTHS: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Active:
    prepared: Prepared
    prompt_len: int

    def columns(self, row: int, slot: int) -> tuple[int, ...]:
        """The request's values in the order of `Column`."""
        prepared, bounds = self.prepared, self.prepared.bounds
        program = prepared.program
        return (
            *(row, self.prompt_len, slot, len(program.scores)),
            *(len(program.functions), int(prepared.looks_back)),
            *(bounds.before, bounds.last, bounds.after),
        )


class Router:
    """The live requests of one engine and the per-token maps of the step."""

    def __init__(self, buffers: Buffers, results: Results) -> None:
        self._buffers = buffers
        self._results = results
        self._uploads = Uploads(buffers)
        self._programs = ProgramRows(buffers, self._uploads)
        self._slots = Slots(buffers, self._uploads)
        self._work = buffers.work
        self._roster = Roster(buffers.rows - 1)
        self._active: dict[str, _Active] = {}
        self._refused: dict[str, str] = {}
        self._partial: dict[str, str] = {}
        self._dirty_tokens = 0
        self._step: Step | None = None

    @property
    def active_requests(self) -> int:
        """Requests with a program that have not ended."""
        return len(self._active)

    @property
    def live_programs(self) -> int:
        """Distinct programs of those requests."""
        return self._programs.live

    @property
    def idle(self) -> bool:
        """Whether no token of this step can have a program."""
        return self._dirty_tokens == 0

    def begin(
        self, request_id: str, program: Program, prompt_len: int, position: int = 0
    ) -> None:
        """A request with a program was admitted.

        Args:
            request_id: the runner's own id.
            program: what it does.
            prompt_len: tokens of its prompt; positions from there on are generated.
            position: of the first token that is computed.
        """
        self.end(request_id)
        prepared = self._programs.acquire(program)
        self._active[request_id] = _Active(prepared, prompt_len)
        self._slots.take(request_id, position)
        # The id may be one of the last batch: a reused one means another program.
        self._roster.touch(request_id)

    def refuse(self, request_id: str, reason: str) -> None:
        """A request was admitted whose program this worker cannot run."""
        self.end(request_id)
        self._refused[request_id] = reason
        self._roster.touch(request_id)

    def end(self, request_id: str) -> None:
        """A request ended; unknown ids (requests without a program) are fine."""
        if not (self._active or self._refused):
            return
        if self._refused.pop(request_id, None) is not None:
            self._roster.touch(request_id)
        ended = self._active.pop(request_id, None)
        if ended is not None:
            self._partial.pop(request_id, None)
            self._slots.release(request_id)
            self._programs.release(ended.prepared.digest)
            self._roster.touch(request_id)

    def preempt(self, request_id: str) -> None:
        """A request lost its place; unless it ends, `resume` follows some time.

        Unknown ids are fine. A refused request is refused again if it comes as new.
        """
        if request_id in self._active:
            self._slots.release(request_id)
            self._roster.touch(request_id)

    def awaits(self, request_id: str) -> bool:
        """Whether a request with a program was preempted and is to be resumed."""
        return request_id in self._active and not self._slots.of(request_id)

    def resume(self, request_id: str, position: int = 0) -> None:
        """A preempted request is computed again, from the token at `position` on.

        What was counted of the tokens before it is lost, and the answer says so.
        """
        if request_id in self._active:
            self._partial.pop(request_id, None)
            if position:
                self._partial[request_id] = _PARTIAL.format(position)
            self._slots.take(request_id, position)
            self._roster.touch(request_id)

    def step(
        self,
        request_ids: Sequence[str],
        query_start_loc: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        num_tokens: int,
        lengths: NDArray[Any],
    ) -> None:
        """Fill the maps for one step.

        Args:
            request_ids: the batch, in the runner's order.
            query_start_loc: int32 `[>= requests + 1]` on the device.
            positions: int64 `[>= num_tokens]` on the device.
            token_ids: int32 or int64 `[>= num_tokens]` on the device.
            num_tokens: tokens of the step, padding excluded.
            lengths: integers `[>= requests]`, the tokens of each request of the batch.
        """
        self._step = None
        if not (self._active or self._refused):
            self.clear()
            return
        self._results.before_step()
        batch = self._roster.unchanged(request_ids) or self._update(request_ids)
        counted = _NO_LENGTHS
        if batch.reads:
            counted = lengths[: len(batch.request_ids)].astype(np.int64)
        region = self._results.region(batch, counted)
        if batch.place:
            self._route(
                batch, query_start_loc, positions, token_ids, num_tokens, region
            )
        else:
            self.clear()
        if batch.place or batch.errors:
            self._step = Step(batch, counted, region, query_start_loc, positions)

    def take_step(self) -> Step | None:
        """The step that was routed last, once: None if it holds no program."""
        step, self._step = self._step, None
        return step

    def warm_up(self) -> None:
        """Compile what a first step with a program would have to wait for."""
        device = self._buffers.device
        batch = self._update([""])
        self._uploads.put(self._uploads.blocks([("slots", 0, None)]), 0)
        batch.per_request = self._uploads.send(self._roster.columns_for_device())
        starts = torch.zeros(4, dtype=torch.int32, device=device)
        positions = torch.zeros(4, dtype=torch.int64, device=device)
        token_ids = torch.zeros(4, dtype=torch.int32, device=device)
        self._route(batch, starts, positions, token_ids, 0, Region())
        self._results.collect(Step(batch, _NO_LENGTHS, Region(), starts, positions))

    def clear(self) -> None:
        """Make every token idle, if the last step left one that is not."""
        if self._dirty_tokens:
            self._buffers.token_map[:, : self._dirty_tokens].zero_()
            self._buffers.select[: self._dirty_tokens].zero_()
            self._dirty_tokens = 0

    def _route(
        self,
        batch: Batch,
        query_start_loc: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        num_tokens: int,
        region: Region,
    ) -> None:
        buffers = self._buffers
        contracts.route_(
            buffers.token_map,
            buffers.program,
            buffers.select,
            self._work,
            batch.per_request,
            query_start_loc,
            positions,
            token_ids,
            buffers.clauses,
            buffers.token_ids,
            buffers.token_sets,
            len(batch.request_ids),
            max(num_tokens, self._dirty_tokens),
            region.start,
            region.limit,
        )
        self._dirty_tokens = num_tokens

    def _update(self, ids: Sequence[str]) -> Batch:
        """The batch of these requests, with its rows and slots on the device."""
        changed = self._roster.changed(ids)
        active = {place: self._active.get(ids[place]) for place in changed}
        present = [found for found in active.values() if found is not None]
        rows = self._programs.place(
            (found.prepared.digest for found in present), lambda: self._digests(ids)
        )
        columns: dict[int, tuple[int, ...] | None] = dict.fromkeys(changed)
        for place, found in active.items():
            if found is not None:
                slot = self._slots.of(ids[place]) or self._slots.take(ids[place])
                columns[place] = found.columns(rows[found.prepared.digest], slot)
        known = self._refused | self._partial
        errors = {key: known[key] for key in known.keys() & ids}
        batch = self._roster.update(ids, columns, errors, self._program)
        if batch.place:
            self._results.begin_at(self._slots.clear_fresh())
            batch.per_request = self._uploads.send(self._roster.columns_for_device())
        return batch

    def _digests(self, ids: Sequence[str]) -> list[str]:
        found = (self._active.get(request) for request in ids)
        return [active.prepared.digest for active in found if active is not None]

    def _program(self, request_id: str) -> Program:
        return self._active[request_id].prepared.program


def prompt_length(request: Any) -> int:
    """Tokens in the prompt of one of vLLM's requests, generated ones excluded."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return int(request.prompt_embeds.shape[0])
