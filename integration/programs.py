"""Rows of the program tables: one per distinct live program, reused as programs end."""

from collections.abc import Iterable

import torch

from eyesplice.fx_passes.program import (
    Program,
    pack,
    pack_clauses,
    pack_reads,
    pack_token_ids,
)
from eyesplice.fx_passes.sites import Table
from eyesplice.integration.buffers import Buffers


class ProgramRows:
    """Interns programs by digest and keeps the tables in step.

    A program's row is its own while a request of the current batch uses it. There is a
    row for every request that a batch can hold, so a batch never runs out: programs of
    preempted requests give their rows up when others need them, and are uploaded again
    when they come back.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._flat = buffers.program.flatten(0, 1)
        self._max_entries = buffers.program.shape[2] - 1
        self._free = list(range(buffers.rows - 1, 0, -1))
        self._programs: dict[str, Program] = {}
        self._uses: dict[str, int] = {}
        self._row: dict[str, int] = {}
        self._tables_of_row: dict[int, frozenset[Table]] = {}

    @property
    def live(self) -> int:
        """Distinct programs of the requests that have not ended."""
        return len(self._uses)

    def acquire(self, program: Program) -> None:
        """Count one more request that uses the program."""
        self._programs[program.digest] = program
        self._uses[program.digest] = self._uses.get(program.digest, 0) + 1

    def release(self, digest: str) -> None:
        """Count one request less; the last one frees the row."""
        self._uses[digest] -= 1
        if self._uses[digest]:
            return
        del self._uses[digest], self._programs[digest]
        row = self._row.pop(digest, None)
        if row is not None:
            self._free.append(row)

    def place(self, digests: Iterable[str]) -> dict[str, int]:
        """The row of each program of one batch, uploading those that have none.

        Args:
            digests: acquired programs; at most as many as a batch can hold.
        """
        needed = dict.fromkeys(digests)
        uploads = [digest for digest in needed if digest not in self._row]
        if uploads:
            self._make_room(len(uploads), needed)
            for digest in uploads:
                self._row[digest] = self._free.pop()
            self._upload(uploads)
        return {digest: self._row[digest] for digest in needed}

    def _make_room(self, count: int, needed: Iterable[str]) -> None:
        keep = set(needed)
        for digest in [d for d in self._row if d not in keep]:
            if len(self._free) >= count:
                return
            self._free.append(self._row.pop(digest))
        assert len(self._free) >= count, "a batch has more requests than max_num_seqs"

    def _upload(self, digests: list[str]) -> None:
        """Write the programs' rows, and clear what their last owners left there."""
        rows = self._buffers.rows
        places, blocks = [], []
        row_numbers = [self._row[digest] for digest in digests]
        for digest in digests:
            program, row = self._programs[digest], self._row[digest]
            tables = frozenset(program.tables)
            for table in sorted(tables | self._tables_of_row.get(row, frozenset())):
                entries = program.tables.get(table, ())
                places.append(self._buffers.index[table] * rows + row)
                blocks.append(pack(entries, self._max_entries))
            self._tables_of_row[row] = tables
        device = self._flat.device
        if places:
            self._flat.index_copy_(
                0, to_device(places, device), to_device(torch.stack(blocks), device)
            )
        rows_of_programs = to_device(row_numbers, device)
        programs = [self._programs[digest] for digest in digests]
        max_scores = self._buffers.reads.shape[1] - 1
        for tensor, packed in (
            (self._buffers.clauses, [pack_clauses(p.clauses) for p in programs]),
            (self._buffers.reads, [pack_reads(p, max_scores) for p in programs]),
            (self._buffers.token_ids, [pack_token_ids(p) for p in programs]),
        ):
            tensor.index_copy_(
                0, rows_of_programs, to_device(torch.stack(packed), device)
            )


def to_device(values: torch.Tensor | list[int], device: torch.device) -> torch.Tensor:
    """A copy on the device, in stream order and without waiting for it.

    The pinned source is new each time: the copy of an earlier step may still be under
    way. Torch's allocator does not reuse it before the copy has run.
    """
    source = torch.as_tensor(values)
    if device.type != "cuda":
        return source.to(device)
    return source.pin_memory().to(device, non_blocking=True)
