"""Tells the ops which program each token of a step belongs to.

Called by the runners' wrappers in stream order, before the forward pass of each step.
With no steered request in the engine and clean maps it does nothing at all.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice.fx_passes.program import Program
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.programs import ProgramRows, to_device
from eyesplice.ops import contracts

_ALIGN: Final = 64
"""Both rows of a copied list start on a 16-byte boundary, as Triton's kernels assume."""


class Router:
    """The live requests of one engine and the per-token maps of the step."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._programs = ProgramRows(buffers)
        self._active: dict[str, tuple[str, int]] = {}
        self._dirty_tokens = 0
        self._batch: list[str] = []
        self._request_row: Tensor | None = None
        self._prompt_len: Tensor | None = None

    @property
    def active_requests(self) -> int:
        """Requests with a program that have not ended."""
        return len(self._active)

    @property
    def live_programs(self) -> int:
        """Distinct programs of those requests."""
        return self._programs.live

    def begin(self, request_id: str, program: Program, prompt_len: int) -> None:
        """A request with a program was admitted, or admitted again after preemption.

        Args:
            request_id: the runner's own id.
            program: what it does.
            prompt_len: tokens of its prompt; positions from there on are generated.
        """
        self.end(request_id)
        self._programs.acquire(program)
        self._active[request_id] = (program.digest, prompt_len)
        # The id may be one of the last batch: a reused one means another program.
        self._batch = []

    def end(self, request_id: str) -> None:
        """A request ended; unknown ids (requests without a program) are fine."""
        ended = self._active.pop(request_id, None)
        if ended is not None:
            self._programs.release(ended[0])
            self._batch = []

    def step(
        self,
        request_ids: Sequence[str],
        query_start_loc: Tensor,
        positions: Tensor,
        num_tokens: int,
    ) -> None:
        """Fill the maps for one step.

        Args:
            request_ids: the batch, in the runner's order.
            query_start_loc: int32 `[>= requests + 1]` on the device.
            positions: int64 `[>= num_tokens]` on the device.
            num_tokens: tokens of the step, padding excluded.
        """
        if not self._active:
            self.clear()
            return
        batch = list(request_ids)
        if batch != self._batch:
            self._set_batch(batch)
        assert self._request_row is not None and self._prompt_len is not None
        extent = max(num_tokens, self._dirty_tokens)
        contracts.route_(
            self._buffers.row_of_token,
            self._buffers.select,
            self._request_row,
            self._prompt_len,
            query_start_loc,
            positions,
            self._buffers.clauses,
            len(batch),
            extent,
        )
        self._dirty_tokens = num_tokens

    def warm_up(self) -> None:
        """Compile what a first steered step would have to wait for."""
        device = self._buffers.row_of_token.device
        self._set_batch([""])
        assert self._request_row is not None and self._prompt_len is not None
        contracts.route_(
            self._buffers.row_of_token,
            self._buffers.select,
            self._request_row,
            self._prompt_len,
            torch.zeros(4, dtype=torch.int32, device=device),
            torch.zeros(4, dtype=torch.int64, device=device),
            self._buffers.clauses,
            1,
            0,
        )

    def clear(self) -> None:
        """Make every token idle, if the last step left one that is not."""
        if self._dirty_tokens:
            self._buffers.row_of_token[: self._dirty_tokens].zero_()
            self._buffers.select[: self._dirty_tokens].zero_()
            self._dirty_tokens = 0

    def _set_batch(self, batch: list[str]) -> None:
        active = [self._active.get(request) for request in batch]
        rows = self._programs.place(digest for digest, _ in _present(active))
        per_request = torch.zeros(
            2, -(-len(batch) // _ALIGN) * _ALIGN, dtype=torch.int32
        )
        per_request[:, : len(batch)] = torch.tensor(
            [(rows[a[0]], a[1]) if a else (0, 0) for a in active], dtype=torch.int32
        ).T
        moved = to_device(per_request, self._buffers.row_of_token.device)
        self._request_row, self._prompt_len = moved[0], moved[1]
        self._batch = batch


def _present(items: Iterable[tuple[str, int] | None]) -> Iterable[tuple[str, int]]:
    return (item for item in items if item is not None)


def prompt_length(request: Any) -> int:
    """Tokens in the prompt of one of vLLM's requests, generated ones excluded."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return int(request.prompt_embeds.shape[0])
