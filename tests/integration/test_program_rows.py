"""Rows of the program tables: interned, reused, and never too few for a batch."""

import random

import pytest
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import Clause, Entry, Program, pack, pack_clauses
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.programs import ProgramRows
from eyesplice.ops.layout import ClauseKind, Opcode, Stage

ROOM, ENTRIES, LAYERS = 3, 2, 4


@pytest.fixture
def buffers() -> Buffers:
    plan = SplicePlan(
        layers_path="layers",
        num_layers=LAYERS,
        wanted=frozenset(Site(layer, "residual.mid") for layer in range(LAYERS)),
    )
    return Buffers.allocate(
        plan,
        max_tokens=8,
        max_requests=ROOM,
        max_entries=ENTRIES,
        bank_shape=(4, 8),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _program(number: int) -> Program:
    entry = Entry(
        stage=Stage.STREAM, opcode=Opcode.ADD, u=1, clause_mask=1, gain=float(number)
    )
    tables = {Table("mid", number % LAYERS): (entry,)}
    if number % 2:
        tables[Table("mid", (number + 1) % LAYERS)] = (entry, entry)
    clause = Clause(ClauseKind.RANGE, number, number + 1)
    return Program(f"sha256:{number}", (clause,), tables)


def _assert_holds(buffers: Buffers, row: int, program: Program) -> None:
    for table, place in buffers.index.items():
        expected = pack(program.tables.get(table, ()), ENTRIES)
        assert torch.equal(buffers.program[place, row], expected), table
    assert torch.equal(buffers.clauses[row], pack_clauses(program.clauses))


def test_more_live_programs_than_rows_take_turns(buffers: Buffers):
    rows, programs = ProgramRows(buffers), [_program(n) for n in range(8)]
    for program in programs:
        rows.acquire(program)
    assert rows.live == len(programs)
    chance = random.Random(0)
    for _ in range(60):
        batch = chance.sample(programs, chance.randint(1, ROOM))
        placed = rows.place(program.digest for program in batch)
        assert len(set(placed.values())) == len(batch) and 0 not in placed.values()
        for program in batch:
            _assert_holds(buffers, placed[program.digest], program)
        assert not buffers.program[:, 0].any(), "the idle row is not empty"


def test_equal_programs_share_a_row_until_the_last_one_ends(buffers: Buffers):
    rows, shared = ProgramRows(buffers), _program(1)
    rows.acquire(shared)
    rows.acquire(shared)
    first = rows.place([shared.digest, shared.digest])
    rows.release(shared.digest)
    assert rows.live == 1 and rows.place([shared.digest]) == first
    rows.release(shared.digest)
    assert rows.live == 0


def test_rows_of_ended_programs_come_back_clean(buffers: Buffers):
    rows = ProgramRows(buffers)
    for number in range(40):
        program = _program(number)
        rows.acquire(program)
        _assert_holds(buffers, rows.place([program.digest])[program.digest], program)
        rows.release(program.digest)
    assert rows.live == 0
