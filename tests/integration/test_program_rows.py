"""Rows of the program tables: interned, reused, and never too few for a batch."""

import random

import numpy as np
import pytest
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import Clause, Entry, Program, pack, pack_clauses
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.programs import ProgramRows
from eyesplice.integration.results import Results
from eyesplice.integration.router import Router
from eyesplice.integration.uploads import Uploads
from eyesplice.ops.layout import ClauseKind, Opcode, Stage
from eyesplice.ops.token_map import ROW_MASK

ROOM, ENTRIES, LAYERS = 3, 2, 4


@pytest.fixture
def buffers() -> Buffers:
    plan = SplicePlan(
        layers_path="layers",
        num_layers=LAYERS,
        wanted=frozenset(Site(layer, "residual.mid") for layer in range(LAYERS)),
    )
    sizes = BufferSizes(
        tokens=8, requests=ROOM, entries=ENTRIES, bank_rows=4, width=8, capture_rows=4
    )
    return Buffers.allocate(
        plan, sizes, dtype=torch.float32, device=torch.device("cpu")
    )


def _program(number: int) -> Program:
    entry = Entry(
        stage=Stage.STREAM, opcode=Opcode.ADD, u=1, clause_mask=1, gain=float(number)
    )
    tables = {Table("mid", number % LAYERS): (entry,)}
    if number % 2:
        tables[Table("mid", (number + 1) % LAYERS)] = (entry, entry)
    clause = Clause(ClauseKind.RANGE, 0, 1 + number)
    return Program(f"sha256:{number}", (clause,), tables)


class Rows:
    """Program rows whose uploads are sent at once."""

    def __init__(self, buffers: Buffers) -> None:
        self._uploads = Uploads(buffers)
        self._rows = ProgramRows(buffers, self._uploads)
        self.acquire, self.release = self._rows.acquire, self._rows.release

    @property
    def live(self) -> int:
        return self._rows.live

    def place(self, digests) -> dict[str, int]:
        placed = self._rows.place(digests)
        table = np.arange(6, dtype=np.int32).reshape(2, 3)
        assert self._uploads.send(table).tolist() == table.tolist()
        return placed


def _assert_holds(buffers: Buffers, row: int, program: Program) -> None:
    for table, place in buffers.index.items():
        expected = pack(program.tables.get(table, ()), ENTRIES)
        assert torch.equal(buffers.program[place, row], expected), table
    assert torch.equal(buffers.clauses[row], pack_clauses(program.clauses))


def test_more_live_programs_than_rows_take_turns(buffers: Buffers):
    rows, programs = Rows(buffers), [_program(n) for n in range(8)]
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
    rows, shared = Rows(buffers), _program(1)
    rows.acquire(shared)
    rows.acquire(shared)
    first = rows.place([shared.digest, shared.digest])
    rows.release(shared.digest)
    assert rows.live == 1 and rows.place([shared.digest]) == first
    rows.release(shared.digest)
    assert rows.live == 0


def test_rows_of_ended_programs_come_back_clean(buffers: Buffers):
    rows = Rows(buffers)
    for number in range(40):
        program = _program(number)
        rows.acquire(program)
        _assert_holds(buffers, rows.place([program.digest])[program.digest], program)
        rows.release(program.digest)
    assert rows.live == 0


class Step:
    """One step of a batch of one-token requests through the router."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers, self.router = buffers, Router(buffers, Results(buffers, {}))

    def rows(self, *ids: str, position: int = 0) -> list[int]:
        starts = torch.arange(len(ids) + 1, dtype=torch.int32)
        positions, token_ids = torch.full((len(ids),), position), torch.zeros(len(ids))
        lengths = np.ones(len(ids), dtype=np.int32)
        self.router.step(ids, starts, positions, token_ids.long(), len(ids), lengths)
        maps = self.buffers.token_map[:, : len(ids)] & ROW_MASK
        # A token has one row, or none where its program can do nothing.
        return maps.amax(dim=0).tolist()

    def words(self, tokens: int) -> list[list[int]]:
        """The words of the first tokens in every table."""
        return self.buffers.token_map[:, :tokens].tolist()


def test_an_id_that_is_used_again_gets_its_own_program(buffers: Buffers):
    step = Step(buffers)
    step.router.begin("other", _program(1), 4)
    other, plain = step.rows("other", "again")
    assert other and not plain
    # "again" ends and comes back with a program while the batch has the same ids.
    step.router.end("again")
    step.router.begin("again", _program(2), 4)
    still, steered = step.rows("other", "again")
    assert still == other
    assert steered not in (0, other)
    _assert_holds(buffers, steered, _program(2))
    step.router.end("again")
    assert step.rows("other", "again") == [other, 0]


def test_the_maps_are_cleared_once_and_then_left_alone(buffers: Buffers):
    step = Step(buffers)
    step.router.begin("a", _program(1), 4)
    assert step.rows("a", "a", "a") != [0, 0, 0]
    assert step.rows("b") == [0]
    assert not buffers.token_map.any()
    step.router.end("a")
    assert step.rows("b") == [0]
    buffers.token_map.fill_(7)
    assert step.rows("b") == [7], "an idle engine writes nothing"


def test_a_token_is_idle_in_the_tables_that_its_program_leaves_alone(
    buffers: Buffers,
):
    """`_program(1)` adds vector 1 at layer 1 and, twice, at layer 2."""
    step = Step(buffers)
    step.router.begin("a", _program(1), 4)
    step.router.begin("b", _program(2), 4)
    a, idle, b = step.rows("a", "c", "b")
    assert a and b and a != b and not idle
    vector = 1 << 13
    once, twice = vector + (1 << 28), vector + (2 << 28)
    tables = [buffers.index[Table("mid", layer)] for layer in range(LAYERS)]
    words = step.words(4)
    assert [words[table] for table in tables] == [
        [0, 0, 0, 0],
        [a + once, 0, 0, 0],
        [a + twice, 0, b + once, 0],
        [0, 0, 0, 0],
    ]


def test_a_token_is_idle_where_its_program_does_not_act(buffers: Buffers):
    """`_program(n)` acts on positions 0 to n."""
    step = Step(buffers)
    step.router.begin("a", _program(1), 4)
    step.router.begin("b", _program(2), 4)
    a, b = step.rows("a", "b")
    assert a and b
    assert step.rows("a", "b", position=1) == [a, b]
    assert step.rows("a", "b", position=2) == [0, b]
    assert step.rows("a", "b", position=3) == [0, 0]


def test_every_map_begins_where_a_kernel_likes_it(buffers: Buffers):
    assert buffers.token_map.shape == (LAYERS, 8)
    for token_map in buffers.token_map:
        assert token_map.data_ptr() % 64 == 0
