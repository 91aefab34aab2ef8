"""Programs as the worker keeps them: packed for the tables, and summed up for the host."""

from dataclasses import dataclass

import numpy as np

from eyesplice.fx_passes.program import (
    Program,
    pack_clauses,
    pack_reads,
    pack_tables,
    pack_token_ids,
)
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.capture_bounds import CaptureBounds
from eyesplice.integration.uploads import Blocks, Uploads


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One program.

    Attributes:
        program: the program.
        blocks: its row in every table that has one.
        places: its non-empty program tables, numbered over the deployment's.
        bounds: how many captures a token can have.
        looks_back: whether its gates look at what earlier steps scored or latched.
    """

    program: Program
    blocks: Blocks
    places: frozenset[int]
    bounds: CaptureBounds
    looks_back: bool

    @property
    def digest(self) -> str:
        """The program's."""
        return self.program.digest

    @classmethod
    def of(cls, program: Program, buffers: Buffers, uploads: Uploads) -> "Prepared":
        """Pack a program for these tables."""
        places = [buffers.index[table] for table in program.tables]
        max_entries = buffers.program.shape[2] - 1
        tables = pack_tables(program.tables.values(), max_entries).numpy()
        reads = np.zeros(uploads.row_words("reads"), dtype=np.int32)
        packed = pack_reads(program, buffers.score.shape[1])
        reads[: len(packed)] = packed.numpy()
        return cls(
            program=program,
            blocks=uploads.blocks(
                [
                    ("clauses", 0, pack_clauses(program.clauses).numpy()),
                    ("token_ids", 0, pack_token_ids(program).numpy()),
                    ("reads", 0, reads),
                    *zip(["program"] * len(places), places, tables, strict=True),
                ]
            ),
            places=frozenset(places),
            bounds=CaptureBounds.of(program),
            looks_back=bool(program.latched)
            or any(score.scope for score in program.scores),
        )
