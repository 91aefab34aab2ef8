"""How many rows a step can capture: never fewer than the op that decides lets through."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyesplice.fx_passes.program import (
    CaptureInfo,
    Clause,
    Entry,
    Program,
    pack,
    pack_clauses,
    pack_token_ids,
)
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.integration.capture_bounds import CaptureBounds
from eyesplice.ops import reference
from eyesplice.ops.layout import ClauseKind, Opcode, PerRequest, Stage
from eyesplice.ops.work import empty_work

PROMPT, TOKENS = 5, 9
SIMPLE = [
    ((Clause(ClauseKind.ALL),), (1, 1, 1)),
    ((Clause(ClauseKind.PROMPT),), (1, 1, 0)),
    ((Clause(ClauseKind.LAST),), (0, 1, 0)),
    ((Clause(ClauseKind.GENERATED),), (0, 0, 1)),
    ((Clause(ClauseKind.FALSE),), (0, 0, 0)),
    ((Clause(ClauseKind.RANGE, -1, 0, 3),), (0, 1, 0)),
    ((Clause(ClauseKind.RANGE, -3, -1, 3),), (1, 0, 0)),
    ((Clause(ClauseKind.RANGE, 0, 0, 2),), (1, 1, 0)),
    ((Clause(ClauseKind.RANGE, 0, 2**31 - 1, 1),), (0, 0, 1)),
    ((Clause(ClauseKind.RANGE, 0, 4),), (1, 1, 1)),
    ((Clause(ClauseKind.TOKEN_LIST, 0, 1),), (1, 1, 1)),
]


def capturing(clauses, mask=None, extra=()) -> Program:
    mask = 1 << (len(clauses) - 1) if mask is None else mask
    entry = Entry(stage=Stage.STREAM, opcode=Opcode.CAPTURE, clause_mask=mask)
    return Program(
        "sha256:1",
        tuple(clauses),
        {Table("mid", 0): (*extra, entry)},
        captures=(CaptureInfo(0, Site(0, "residual.mid")),),
        token_ids=(3, 7),
    )


def counts(program):
    bounds = CaptureBounds.of(program)
    return bounds.before, bounds.last, bounds.after


@pytest.mark.parametrize(("clauses", "expected"), SIMPLE, ids=str)
def test_plain_conditions_are_bounded_tightly(clauses, expected):
    assert counts(capturing(clauses)) == expected


def test_circuits_and_gates_are_bounded():
    prompt, last = Clause(ClauseKind.PROMPT), Clause(ClauseKind.LAST)
    not_last = Clause(ClauseKind.NOR, 0b10)
    both = Clause(ClauseKind.AND, 0b101)
    assert counts(capturing((prompt, last, not_last, both))) == (1, 0, 0)
    either = Clause(ClauseKind.OR, 0b11)
    assert counts(capturing((prompt, last, either))) == (1, 1, 0)
    # A gate of which nothing is known, and the condition: no more than the condition.
    logic = Entry(
        stage=Stage.STREAM, opcode=Opcode.LOGIC, function=ClauseKind.AND, u=0b11, bit=4
    )
    assert counts(capturing((last,), 4, (logic,))) == (0, 1, 0)
    assert counts(capturing((last,), 2)) == (1, 1, 1)


def test_each_capture_counts_and_no_capture_is_nothing():
    program = capturing((Clause(ClauseKind.LAST), Clause(ClauseKind.ALL)), 1)
    (entry,) = program.tables[Table("mid", 0)]
    other = Entry(stage=Stage.STREAM, opcode=Opcode.CAPTURE, u=1, clause_mask=2)
    tables = {Table("mid", 0): (entry, other), Table("mid", 1): (entry,)}
    program = Program("d", program.clauses, tables, captures=program.captures)
    assert counts(program) == (1, 3, 1)
    assert counts(Program("e", program.clauses, {})) == (0, 0, 0)


@st.composite
def circuits(draw):
    clauses = []
    for index in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(list(ClauseKind)))
        if kind in (ClauseKind.AND, ClauseKind.OR, ClauseKind.NOR, ClauseKind.AFTER):
            clauses.append(Clause(kind, draw(st.integers(0, (1 << index) - 1))))
        elif kind is ClauseKind.RANGE:
            a, b = draw(st.integers(-7, 9)), draw(st.integers(-7, 9))
            clauses.append(Clause(kind, a, b, draw(st.integers(0, 3))))
        elif kind is ClauseKind.TOKEN_LIST:
            clauses.append(Clause(kind, 0, draw(st.integers(0, 2))))
        else:
            clauses.append(Clause(kind, 0))
    return clauses, draw(st.integers(1, (1 << len(clauses)) - 1))


@settings(max_examples=150, deadline=None)
@given(circuits(), st.lists(st.integers(0, 8), min_size=TOKENS, max_size=TOKENS))
def test_no_token_is_captured_that_the_bounds_leave_out(circuit, token_ids):
    clauses, mask = circuit
    program = capturing(clauses, mask)
    work = list(empty_work(TOKENS, 2, 1, 1, 4, torch.float32, "cpu"))
    per_request = torch.zeros(4, 1, dtype=torch.int32)
    per_request[[PerRequest.ROW, PerRequest.SLOT]] = 1
    per_request[PerRequest.PROMPT_LEN] = PROMPT
    words, select = torch.zeros(2, TOKENS, dtype=torch.int32)
    programs = torch.stack([pack((), 1)] * 2)[None]
    sets = torch.full((1, 1), 0b1010, dtype=torch.int32)
    reference.route_(
        *(words[None], programs, select),
        *(work, per_request),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS),
        torch.tensor(token_ids),
        torch.stack([pack_clauses([]), pack_clauses(clauses)]),
        torch.stack([pack_token_ids(program)] * 2),
        *(sets, 1, TOKENS, 0, 1),
    )
    acts = ((select.long() & mask) != 0).tolist()
    before, last, after = counts(program)
    assert before or not any(acts[: PROMPT - 1])
    assert last or not acts[PROMPT - 1]
    assert after or not any(acts[PROMPT:])
