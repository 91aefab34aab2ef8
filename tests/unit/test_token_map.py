"""The word of a token at one boundary, against words written by hand."""

import pytest
import torch

from eyesplice.fx_passes.program import Entry, pack
from eyesplice.ops.layout import GENERAL, Function, Header, Opcode, Stage, Word
from eyesplice.ops.token_map import MAX_ROWS, ROW_MASK, word, words_of

ROW = 5
VECTOR = 1 << 13
NUMBER = 1 << 28


def add(u=3, *, stage=Stage.STREAM, **fields):
    fields = {"opcode": Opcode.ADD, "gain": 1.0, "clause_mask": 1, "u": u} | fields
    return Entry(stage=stage, **fields)


ABLATION = add(opcode=Opcode.RANK1, function=Function.IDENTITY, v=3)
CASES = {
    "nothing": ((), 0),
    "one vector": ((add(3),), ROW + 3 * VECTOR + 1 * NUMBER),
    "one on the branch": ((add(4, stage=Stage.BRANCH),), ROW + 4 * VECTOR + NUMBER),
    "the branch's comes first": (
        (add(9), add(4, stage=Stage.BRANCH)),
        ROW + 4 * VECTOR + 2 * NUMBER,
    ),
    "seven vectors": ([add(6 + i) for i in range(7)], ROW + 6 * VECTOR + 7 * NUMBER),
    "eight vectors": ([add(6 + i) for i in range(8)], ROW),
    "counted": ((add(3, counter=1, bit=1),), ROW),
    "the second is counted": ((add(3), add(4, counter=2, bit=1)), ROW),
    "length kept": ((add(3, flags=1),), ROW),
    "rank 1": ((ABLATION,), ROW),
    "a vector and rank 1": ((add(3), ABLATION), ROW),
    "on the normed value": ((add(3, stage=Stage.NORMED),), ROW),
    "also on the normed value": ((add(3), add(3, stage=Stage.NORMED)), ROW),
    "a read": ((add(3, opcode=Opcode.READ, v=3),), ROW),
    "an own op": ((add(0, opcode=Opcode.CUSTOM),), ROW),
    "the last vector": ((add(32767),), ROW + 32767 * VECTOR + NUMBER),
    "a vector beyond": ((add(32768),), ROW),
    "beyond, but not the first": (
        (add(2), add(32768)),
        ROW + 2 * VECTOR + 2 * NUMBER,
    ),
    "the row of zeros": ((add(0),), ROW),
}


def by_stage(entries):
    return sorted(entries, key=lambda entry: entry.stage)


@pytest.mark.parametrize("name", CASES)
def test_the_word_of_a_program(name):
    entries, expected = CASES[name]
    assert word(ROW, by_stage(entries)) == expected
    assert word(0, by_stage(entries)) == 0


def test_the_words_of_a_steps_tokens():
    """Table k holds the k-th program in ROW, and the next one's in the row after it."""
    programs = [pack(by_stage(entries), 8) for entries, _ in CASES.values()]
    words = [expected for _, expected in CASES.values()]
    table = torch.zeros(len(CASES), MAX_ROWS, *programs[0].shape, dtype=torch.int32)
    for k, program in enumerate(programs):
        table[k, 0] = programs[1]
        table[k, ROW] = program
        table[k, MAX_ROWS - 1] = programs[1]
    # Clause 0 is what the entries ask for; at the third token others are true.
    rows = torch.tensor([ROW, 0, ROW, 7, MAX_ROWS - 1], dtype=torch.int32)
    select = torch.tensor([1, 1, -2, 0, 3], dtype=torch.int32)
    found = words_of(table, rows, select)
    assert found.dtype == torch.int32
    last = 8191 + 3 * VECTOR + NUMBER
    assert found.tolist() == [[w, 0, 0, 0, last] for w in words]
    # Without clauses in its header, a row may act at any token.
    table[:, :, 0, Header.CLAUSES] = 0
    found = words_of(table, rows, torch.zeros_like(select))
    assert found.tolist() == [[w, 0, w, 0, last] for w in words]


def test_the_largest_word_is_no_negative_number():
    assert word(8191, [add(32767)] * 7) == 2**31 - 1
    assert 8191 == ROW_MASK == MAX_ROWS - 1


def test_a_headers_number_of_vectors():
    """The first vector's row decides what a map can say, and is no part of the header."""
    for name, (entries, expected) in CASES.items():
        header = pack(by_stage(entries), 8)[0]
        if name in ("a vector beyond", "the row of zeros"):
            assert header[Header.ADDS] == 1
        else:
            assert header[Header.ADDS] == expected >> 28, name
    assert pack([ABLATION], 8)[0, Header.SIMPLE] == 1 != GENERAL
    assert pack([add(9)], 8)[1, Word.U] == 9
