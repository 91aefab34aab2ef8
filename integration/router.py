"""Tells the ops which program each token of a step belongs to.

Called by the runners' wrappers in stream order, before the forward pass of each step.
With no request in the engine that has a program, and clean maps, it does nothing at all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice.fx_passes.program import Program
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.captures import Region
from eyesplice.integration.programs import ProgramRows, to_device
from eyesplice.integration.results import Batch, Member, Results, Step
from eyesplice.integration.slots import Slots
from eyesplice.ops import contracts
from eyesplice.ops.layout import PerRequest

_ALIGN: Final = 64
"""All rows of a copied table start on a 16-byte boundary, as Triton's kernels assume."""


@dataclass(frozen=True, slots=True)
class _Active:
    program: Program
    prompt_len: int


class Router:
    """The live requests of one engine and the per-token maps of the step."""

    def __init__(self, buffers: Buffers, results: Results) -> None:
        self._buffers = buffers
        self._results = results
        self._programs = ProgramRows(buffers)
        self._slots = Slots(buffers)
        self._active: dict[str, _Active] = {}
        self._refused: dict[str, str] = {}
        self._dirty_tokens = 0
        self._batch: Batch | None = None
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

    def begin(self, request_id: str, program: Program, prompt_len: int) -> None:
        """A request with a program was admitted, or admitted again after preemption.

        Args:
            request_id: the runner's own id.
            program: what it does.
            prompt_len: tokens of its prompt; positions from there on are generated.
        """
        self.end(request_id)
        self._programs.acquire(program)
        self._active[request_id] = _Active(program, prompt_len)
        self._slots.take(request_id)
        # The id may be one of the last batch: a reused one means another program.
        self._batch = None

    def refuse(self, request_id: str, reason: str) -> None:
        """A request was admitted whose program this worker cannot run."""
        self.end(request_id)
        self._refused[request_id] = reason
        self._batch = None

    def end(self, request_id: str) -> None:
        """A request ended; unknown ids (requests without a program) are fine."""
        if self._refused.pop(request_id, None) is not None:
            self._batch = None
        ended = self._active.pop(request_id, None)
        if ended is not None:
            self._slots.release(request_id)
            self._programs.release(ended.program.digest)
            self._batch = None

    def preempt(self, request_id: str) -> None:
        """A request lost its place; unless it ends, `resume` follows some time."""
        if request_id in self._active:
            self._slots.release(request_id)
            self._batch = None

    def resume(self, request_id: str) -> None:
        """A preempted request is computed again from its first token."""
        if request_id in self._active:
            self._slots.take(request_id)
            self._batch = None

    def step(
        self,
        request_ids: Sequence[str],
        query_start_loc: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        num_tokens: int,
        lengths: Callable[[], Sequence[int]],
    ) -> None:
        """Fill the maps for one step.

        Args:
            request_ids: the batch, in the runner's order.
            query_start_loc: int32 `[>= requests + 1]` on the device.
            positions: int64 `[>= num_tokens]` on the device.
            token_ids: int32 or int64 `[>= num_tokens]` on the device.
            num_tokens: tokens of the step, padding excluded.
            lengths: gives the tokens of each request of the batch.
        """
        self._step = None
        if not (self._active or self._refused):
            self.clear()
            return
        self._results.before_step()
        self._slots.clear_fresh()
        ids = tuple(request_ids)
        if self._batch is None or ids != self._batch.request_ids:
            self._batch = self._place(ids)
        batch = self._batch
        counted = lengths() if batch.reads else ()
        region = self._results.region(batch, counted) if counted else Region()
        if batch.members:
            self._route(
                batch, query_start_loc, positions, token_ids, num_tokens, region
            )
        else:
            self.clear()
        if batch.members or batch.errors:
            self._step = Step(batch, counted, region, query_start_loc, positions)

    def take_step(self) -> Step | None:
        """The step that was routed last, once: None if it holds no program."""
        step, self._step = self._step, None
        return step

    def warm_up(self) -> None:
        """Compile what a first step with a program would have to wait for."""
        device = self._buffers.device
        batch = self._place(("",))
        starts = torch.zeros(4, dtype=torch.int32, device=device)
        positions = torch.zeros(4, dtype=torch.int64, device=device)
        token_ids = torch.zeros(4, dtype=torch.int32, device=device)
        self._route(batch, starts, positions, token_ids, 0, Region())
        self._results.collect(Step(batch, (), Region(), starts, positions))

    def clear(self) -> None:
        """Make every token idle, if the last step left one that is not."""
        if self._dirty_tokens:
            self._buffers.row_of_token[: self._dirty_tokens].zero_()
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
            buffers.row_of_token,
            buffers.select,
            buffers.work,
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

    def _place(self, ids: tuple[str, ...]) -> Batch:
        """Rows, slots and prompt lengths of a batch, on the device."""
        active = [self._active.get(request) for request in ids]
        rows = self._programs.place(a.program.digest for a in _present(active))
        width = -(-len(ids) // _ALIGN) * _ALIGN
        table = torch.zeros(len(PerRequest), width, dtype=torch.int32)
        columns, members = [], []
        for index, (request, found) in enumerate(zip(ids, active, strict=True)):
            if found is None:
                columns.append((0, 0, 0, 0))
                continue
            program, slot = found.program, self._slots.of(request)
            row = rows[program.digest]
            columns.append((row, found.prompt_len, slot, len(program.scores)))
            members.append(Member(request, index, slot, program))
        if columns:
            table[:, : len(ids)] = torch.tensor(columns, dtype=torch.int32).T
        refused = {
            request: self._refused[request] for request in self._refused.keys() & ids
        }
        return Batch(ids, to_device(table, self._buffers.device), members, refused)


def _present(items: Iterable[_Active | None]) -> Iterable[_Active]:
    return (item for item in items if item is not None)


def prompt_length(request: Any) -> int:
    """Tokens in the prompt of one of vLLM's requests, generated ones excluded."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return int(request.prompt_embeds.shape[0])
