"""Which clauses a row asks for, against masks written by hand."""

import pytest

from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import Entry, pack_tables
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.sites import Table
from eyesplice.ops.acting import acting_clauses
from eyesplice.ops.layout import ClauseKind, Header, Opcode, Reduce, Scope, Stage
from tests import request_world

ANYWHERE = 0
CONTEXT = request_world.context(max_entries=64, table=request_world.vectors())


def entry(opcode, **fields):
    return Entry(stage=Stage.STREAM, opcode=opcode, **fields)


def add(mask, **fields):
    return entry(Opcode.ADD, clause_mask=mask, **fields)


def read(mask, slot=0):
    return entry(Opcode.READ, clause_mask=mask, slot=slot)


def compare(bit, slot=0, **fields):
    return entry(Opcode.COMPARE, bit=bit, slot=slot, **fields)


def logic(kind, bit, mask):
    return entry(Opcode.LOGIC, function=kind, bit=bit, u=mask)


AND, OR, NOR = ClauseKind.AND, ClauseKind.OR, ClauseKind.NOR
A, B, C = 1, 2, 4
X, Y, Z = 1 << 8, 1 << 9, 1 << 31
MEAN = {"u": Reduce.MEAN, "v": Scope.PROMPT}
CASES = {
    "nothing": ([[]], [ANYWHERE]),
    "writes": ([[add(A), add(C)], [add(B)]], [A | C, B]),
    "all 32 bits": ([[add(2**32 - 1)]], [2**32 - 1]),
    "captures and own ops": (
        [[entry(Opcode.CAPTURE, clause_mask=A)], [entry(Opcode.CUSTOM, clause_mask=Z)]],
        [A, Z],
    ),
    "counted where its gate is shut": ([[add(A, counter=1, bit=B)]], [A | B]),
    "a bit that counts nothing": ([[add(A, bit=B)]], [A]),
    "a token's own score": ([[read(A), compare(X)], [add(X)]], [A | X, A | X]),
    "a score that two reads make": (
        [[read(A)], [read(B), read(C, slot=1)], [compare(X)], [add(X)]],
        [A, B | C, A | B | X, A | B | X],
    ),
    "a score that no read makes": ([[compare(X)], [add(X | A)]], [X, A | X]),
    "a reduction": (
        [[read(A)], [compare(X, **MEAN)], [add(X)]],
        [A, ANYWHERE, ANYWHERE],
    ),
    "a reduction and a condition": (
        [[compare(X, **MEAN)], [logic(AND, Y, X | B)], [add(Y)], [add(C | Y)]],
        [ANYWHERE, B | Y, B | Y, B | C | Y],
    ),
    "and: the fewest clauses": (
        [[read(A | B), compare(X)], [logic(AND, Y, X | C)], [add(Y)]],
        [A | B | X, C | Y, C | Y],
    ),
    "and of nothing, which is true": ([[logic(AND, X, 0), add(X)]], [ANYWHERE]),
    "or": (
        [[read(A), compare(X)], [logic(OR, Z, X | B), add(Z)]],
        [A | X, A | B | X | Z],
    ),
    "or with a reduction": (
        [[compare(X, **MEAN)], [logic(OR, Y, X | B)]],
        [ANYWHERE, ANYWHERE],
    ),
    "none of": ([[logic(NOR, X, A)], [add(X)], [add(B)]], [ANYWHERE, ANYWHERE, B]),
    "a latch": ([[entry(Opcode.LATCH, bit=X, u=A)], [add(X)]], [ANYWHERE, ANYWHERE]),
    "a gate that may clear a clause": ([[logic(OR, A, B)]], [A | B]),
    "a read under a gate": (
        [[read(A), compare(X)], [read(X, slot=1), compare(Y, slot=1)], [add(Y)]],
        [A | X, A | X | Y, A | X | Y],
    ),
    "tables in any order": (
        [[add(Y)], [logic(OR, Y, X)], [compare(X)], [read(B)]],
        [B | X | Y, B | X | Y, B | X, B],
    ),
    "a gate that looks at itself": ([[logic(AND, X, X)], [add(X)]], [X, X]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_clauses_of_each_table(name):
    tables, expected = CASES[name]
    assert acting_clauses(tables) == expected
    # Bits of the gates are never set before the step, and are as good as not there.
    packed = pack_tables(tables, 4)[:, 0, Header.CLAUSES].tolist()
    assert [word & 0xFFFFFFFF for word in packed] == expected


def lowered(**functions):
    return lower(parse_request({"eyesplice": functions}, CONTEXT), CONTEXT)


def clauses_of(program):
    """{table: kinds of the clauses that its header asks for}, None for any token."""
    kinds = [clause.kind for clause in program.clauses]
    found = acting_clauses(program.tables.values())
    return {
        table: {kind for j, kind in enumerate(kinds) if mask >> j & 1} if mask else None
        for table, mask in zip(program.tables, found, strict=True)
    }


def test_a_capture_of_the_last_prompt_token():
    captures = {"read": "capture", "layers": "all", "when": "last_token"}
    assert set(map(frozenset, clauses_of(lowered(reads=[captures])).values())) == {
        frozenset({ClauseKind.LAST})
    }


def test_a_gated_vector_on_generated_tokens():
    """The mean is compared at every token, and matters where tokens are generated."""
    reads = [{"read": "dot", "name": "a", "weight": "calm", "layers": 0}]
    write = {"vector": "calm", "layers": [1, 2], "when": "generated"}
    generated = {ClauseKind.GENERATED}
    for reduced, expected in (
        ("", [{ClauseKind.ALL} | generated, generated, generated]),
        (".mean", [{ClauseKind.ALL}, None, generated]),
    ):
        writes = [write | {"gate": f"a{reduced} > 0"}]
        found = clauses_of(lowered(reads=reads, writes=writes))
        assert found == {Table("pre", 1 + i): kinds for i, kinds in enumerate(expected)}
