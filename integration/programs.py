"""Rows of the program tables: one per distinct live program, reused as programs end."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from eyesplice.fx_passes.program import Program
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.prepared import Prepared
from eyesplice.integration.uploads import Uploads


class ProgramRows:
    """Interns programs by digest and keeps the tables in step.

    A program's row is its own while a request of the current batch uses it. There is a
    row for every request that a batch can hold, so a batch never runs out: programs of
    preempted requests give their rows up when others need them, and are uploaded again
    when they come back.
    """

    def __init__(self, buffers: Buffers, uploads: Uploads) -> None:
        self._buffers = buffers
        self._uploads = uploads
        self._free = list(range(buffers.rows - 1, 0, -1))
        self._known: OrderedDict[str, Prepared] = OrderedDict()
        self._uses: dict[str, int] = {}
        self._row: dict[str, int] = {}
        self._places_of_row: dict[int, frozenset[int]] = {}

    @property
    def live(self) -> int:
        """Distinct programs of the requests that have not ended."""
        return len(self._uses)

    def acquire(self, program: Program) -> Prepared:
        """Count one more request that uses the program."""
        digest = program.digest
        # Before room is made: what is in use is not forgotten.
        self._uses[digest] = self._uses.get(digest, 0) + 1
        prepared = self._known.get(digest)
        if prepared is None:
            prepared = self._known[digest] = Prepared.of(
                program, self._buffers, self._uploads
            )
            self._forget_some()
        else:
            self._known.move_to_end(digest)
        return prepared

    def release(self, digest: str) -> None:
        """Count one request less; the last one frees the row."""
        self._uses[digest] -= 1
        if self._uses[digest]:
            return
        del self._uses[digest]
        row = self._row.pop(digest, None)
        if row is not None:
            self._free.append(row)

    def place(
        self,
        digests: Iterable[str],
        batch: Callable[[], Iterable[str]] = tuple,
    ) -> dict[str, int]:
        """The row of each of these programs, uploading those that have none.

        Args:
            digests: acquired programs; at most as many as a batch can hold.
            batch: gives the programs that must keep their rows besides.
        """
        needed = dict.fromkeys(digests)
        uploads = [digest for digest in needed if digest not in self._row]
        if uploads:
            if len(self._free) < len(uploads):
                self._make_room(len(uploads), {*needed, *batch()})
            for digest in uploads:
                self._row[digest] = self._free.pop()
            self._upload(uploads)
        return {digest: self._row[digest] for digest in needed}

    def _forget_some(self) -> None:
        # Packing takes longer than all else that a new request costs here.
        spare = 2 * self._buffers.rows
        for digest in list(self._known):
            if len(self._known) <= spare:
                return
            if digest not in self._uses:
                del self._known[digest]

    def _make_room(self, count: int, keep: set[str]) -> None:
        for digest in [d for d in self._row if d not in keep]:
            if len(self._free) >= count:
                return
            self._free.append(self._row.pop(digest))
        assert len(self._free) >= count, "a batch has more requests than max_num_seqs"

    def _upload(self, digests: list[str]) -> None:
        """Write the programs' rows, and clear what their last owners left there."""
        for digest in digests:
            program, row = self._known[digest], self._row[digest]
            stale = self._places_of_row.get(row, frozenset()) - program.places
            self._places_of_row[row] = program.places
            self._uploads.put(program.blocks, row)
            if stale:
                empty = self._uploads.blocks(("program", p, None) for p in stale)
                self._uploads.put(empty, row)
