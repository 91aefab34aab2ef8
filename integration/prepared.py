"""Programs as the worker keeps them: packed for the tables, and summed up for the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyesplice.fx_passes.program import (
    Program,
    pack_clauses,
    pack_reads,
    pack_tables,
    pack_token_ids,
)
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.capture_bounds import CaptureBounds


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One program.

    Attributes:
        program: the program.
        tables: int32 `[tables, words of a row]`, its rows of `program`.
        places: where those are among all tables of the deployment.
        rows: its row of each other table, by name.
        bounds: how many captures a token can have.
        looks_back: whether its gates look at what earlier steps scored or latched.
    """

    program: Program
    tables: NDArray[np.int32]
    places: tuple[int, ...]
    rows: Mapping[str, NDArray[np.int32]]
    bounds: CaptureBounds
    looks_back: bool

    @property
    def digest(self) -> str:
        """The program's."""
        return self.program.digest

    @classmethod
    def of(cls, program: Program, buffers: Buffers) -> "Prepared":
        """Pack a program for these tables."""
        max_entries = buffers.program.shape[2] - 1
        reads = np.zeros(buffers.reads.stride(0), dtype=np.int32)
        packed = pack_reads(program, buffers.score.shape[1])
        reads[: len(packed)] = packed.numpy()
        return cls(
            program=program,
            tables=pack_tables(program.tables.values(), max_entries).flatten(1).numpy(),
            places=tuple(buffers.index[table] for table in program.tables),
            rows={
                "clauses": pack_clauses(program.clauses).numpy().ravel(),
                "token_ids": pack_token_ids(program).numpy(),
                "reads": reads,
            },
            bounds=CaptureBounds.of(program),
            looks_back=bool(program.latched)
            or any(score.scope for score in program.scores),
        )
