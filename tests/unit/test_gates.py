"""The `gate` language, evaluated by the reference ops, against its meaning in Python."""

import math
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyesplice import SpecError
from eyesplice.fx_passes.gate_forms import simplify
from eyesplice.fx_passes.gates import (
    And,
    Compare,
    Constant,
    Latch,
    Not,
    Or,
    ScoreKey,
    check_gate,
    parse_gate,
)
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import pack_reads
from eyesplice.fx_passes.request import parse_canonical, parse_request
from eyesplice.fx_passes.sites import Table
from eyesplice.ops.layout import (
    ClauseKind,
    Comparison,
    Opcode,
    Reduce,
    Scope,
    Stage,
)
from tests import request_world
from tests.program_runner import run

TOKENS = 9
VECTORS = request_world.vectors()
CONTEXT = request_world.context(max_entries=64, table=VECTORS)

READS = [
    {"read": "dot", "name": "a", "weight": "calm", "layers": 0},
    {
        "read": "cosine",
        "name": "b",
        "weight": "pirate",
        "layers": [0, 1],
        "over": "prompt",
    },
    {
        "read": "probe",
        "name": "c",
        "weight": "calm",
        "layers": 1,
        "submodule": "attention.post",
        "when": "not last_token",
        "over": "generated",
    },
    {"read": "norm", "name": "d", "layers": 1, "when": "generated"},
]
WHENS = {
    "all": lambda p, n: True,
    "prompt": lambda p, n: p < n,
    "generated": lambda p, n: p >= n,
    "not last_token": lambda p, n: p != n - 1,
}


def lowered(reads, *writes, context=CONTEXT):
    value = {"reads": list(reads), "writes": list(writes)}
    request = parse_request({"eyesplice": value}, context)
    assert parse_canonical(request.canonical(), context) == request
    return lower(request, context)


def gated(gate, **write):
    return {"vector": "calm", "layers": 3, "gate": gate, **write}


def keyed(reference):
    """Any name is a read's, numbered by its first letter."""
    return ScoreKey(
        ord(reference.name[0]), reference.layer or 0, reference.feature or 0
    )


def entries_of(program, opcode):
    return {
        table: [e for e in entries if e.opcode is opcode]
        for table, entries in program.tables.items()
        if any(e.opcode is opcode for e in entries)
    }


class Truth:
    """A gate's meaning, token after token, from the scores that were read."""

    def __init__(self, program, score, prompt_len):
        self.program, self.score, self.prompt_len = program, score.double(), prompt_len

    def at(self, gate, t):
        match gate:
            case Compare():
                return self.compare(gate, t)
            case Constant(value=value):
                return value
            case Not(part=part):
                return not self.at(part, t)
            case And(parts=parts):
                return all(self.at(part, t) for part in parts)
            case Or(parts=parts):
                return any(self.at(part, t) for part in parts)
            case Latch(part=part):
                return any(self.at(part, earlier) for earlier in range(t + 1))

    def compare(self, gate, t):
        x = self.value(gate, t)
        match gate.comparison:
            case Comparison.LESS:
                return x < gate.value
            case Comparison.LESS_EQUAL:
                return x <= gate.value
            case Comparison.GREATER:
                return x > gate.value
            case Comparison.GREATER_EQUAL:
                return x >= gate.value

    def value(self, gate, t):
        (slot,) = (
            i
            for i, s in enumerate(self.program.scores)
            if (s.function, s.layer) == (gate.score.read, gate.score.layer)
        )
        if gate.reduce is Reduce.NONE:
            return float(self.score[t, slot])
        n = self.prompt_len
        over = self.program.functions[gate.score.read].over
        first, last = {
            Scope.PROMPT: (0, n if t >= n - 1 else 0),
            Scope.GENERATED: (n, t + 1),
            Scope.REQUEST: (0, t + 1),
        }[over]
        found = [float(x) for x in self.score[first:last, slot] if not x.isnan()]
        if not found:
            return math.nan
        match gate.reduce:
            case Reduce.LAST:
                return found[-1]
            case Reduce.MEAN:
                return sum(found) / len(found)
            case Reduce.MAX:
                return max(found)


scores = st.sampled_from(["a", "b(layer=0)", "b(layer=-3)", "c", "d", "dot(layer=0)"])
numbers = st.sampled_from(["-1.5", "0", "0.1", "+2", "5", "1e1", "-0.2"])
comparisons = st.builds(
    lambda x, reduction, operator, number, flip: (
        f"{number} {operator} {x}{reduction}"
        if flip
        else f"{x}{reduction} {operator} {number}"
    ),
    scores,
    st.sampled_from(["", "", ".mean", ".max", ".last"]),
    st.sampled_from(["<", "<=", ">", ">="]),
    numbers,
    st.booleans(),
)
gates = st.recursive(
    comparisons,
    lambda inner: (
        inner.map(lambda g: f"not ({g})")
        | st.tuples(inner, inner).map(lambda g: f"({g[0]}) and ({g[1]})")
        | st.tuples(inner, inner).map(lambda g: f"({g[0]}) or ({g[1]})")
    ),
    max_leaves=4,
)
latched = st.one_of(
    gates,
    gates.map(lambda g: f"latch({g})"),
    st.tuples(gates, gates).map(lambda g: f"({g[0]}) or not latch({g[1]})"),
    st.tuples(gates, gates).map(lambda g: f"latch(({g[0]}) and latch({g[1]}))"),
)


@st.composite
def cuts(draw):
    """A prompt's length and the tokens of each step."""
    steps, left = [], TOKENS
    while left:
        steps.append(draw(st.integers(1, left)))
        left -= steps[-1]
    return draw(st.integers(1, TOKENS)), steps


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(latched, st.sampled_from(list(WHENS))), max_size=2), cuts())
def test_gates_mean_what_python_means(functions, cut):
    prompt_len, steps = cut
    writes = [gated(gate, when=when) for gate, when in functions]
    try:
        program = lowered(READS, *writes)
    except SpecError as error:
        # What random gates can meet: 32 bits.
        assert "different conditions" in str(error)
        return
    ids = list(range(TOKENS))
    outcome = run(program, VECTORS, ids, prompt_len, steps)
    truth = Truth(program, outcome.score, prompt_len)
    request = parse_request({"eyesplice": {"reads": READS, "writes": writes}}, CONTEXT)
    for i, (_, when) in enumerate(functions):
        gate = parse_gate(request.writes[i].gate, resolve_by(program))
        held = [WHENS[when](t, prompt_len) for t in range(TOKENS)]
        acts = [h and truth.at(gate, t) for t, h in enumerate(held)]
        function = len(READS) + i
        entry = next(
            e
            for entries in program.tables.values()
            for e in entries
            if e.counter == 1 + function
        )
        assert [bool(s & entry.clause_mask) for s in outcome.select] == acts
        assert outcome.counts[:, function].tolist() == [sum(acts), sum(held)]


def resolve_by(program):
    """The scores of canonical gates, whose reads have their full names."""

    def resolve(reference):
        names = [f.name for f in program.functions]
        i = names.index(reference.name)
        layer = program.functions[i].layers[0]
        return ScoreKey(i, layer if reference.layer is None else reference.layer, 0)

    return resolve


@settings(deadline=None, max_examples=30)
@given(latched, cuts())
def test_how_a_request_is_cut_into_steps_changes_nothing(gate, cut):
    prompt_len, steps = cut
    with suppress(SpecError):
        program = lowered(READS, gated(gate))
        ids = list(range(TOKENS))
        whole = run(program, VECTORS, ids, prompt_len, [TOKENS])
        parts = run(program, VECTORS, ids, prompt_len, steps)
        assert parts.select == whole.select
        assert torch.equal(parts.counts, whole.counts)
        torch.testing.assert_close(parts.final, whole.final, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=200)
@given(
    st.recursive(
        st.sampled_from("abcdefgh").map(lambda name: f"{name} > 0"),
        lambda inner: (
            inner.map(lambda g: f"not ({g})")
            | st.tuples(inner, inner).map(lambda g: f"({g[0]}) and ({g[1]})")
            | st.tuples(inner, inner).map(lambda g: f"({g[0]}) or ({g[1]})")
        ),
        max_leaves=10,
    )
)
def test_the_simple_form_is_equivalent_and_final(text):
    gate = parse_gate(text, keyed)
    simple = simplify(gate)
    assert simplify(simple) == simple
    for word in range(256):
        assert truth_of(simple, word) == truth_of(gate, word)


def truth_of(gate, word):
    match gate:
        case Compare():
            return bool(word >> (gate.score.read - ord("a")) & 1)
        case Constant(value=value):
            return value
        case Not(part=part):
            return not truth_of(part, word)
        case And(parts=parts):
            return all(truth_of(part, word) for part in parts)
        case Or(parts=parts):
            return any(truth_of(part, word) for part in parts)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("0 <= a", "a >= 0"),
        ("a > -0.0", "a > 0"),
        ("a < 1 and b < 2", "b < 2 and (a < 1 or not 1 > a) and a < 1"),
        ("not (a < 1 or b < 1)", "not a < 1 and not b < 1"),
        ("latch(latch(a < 1))", "latch(1 > a)"),
        ("latch(a < 1 or not a < 1)", "a < 1 or not a < 1"),
    ],
)
def test_equal_gates_have_one_form(left, right):
    assert simplify(parse_gate(left, keyed)) == simplify(parse_gate(right, keyed))


def test_a_comparison_is_not_the_opposite_of_its_mirror():
    for left, right in (("a < 0", "not a >= 0"), ("a", "a.last"), ("a.max", "a.mean")):
        left, right = (text if "0" in text else f"{text} > 0" for text in (left, right))
        assert simplify(parse_gate(left, keyed)) != simplify(parse_gate(right, keyed))


def test_a_plain_gate_stands_right_behind_its_read():
    program = lowered(
        READS[:1],
        gated("a >= 0.5", layers=[1, 2], when="generated"),
        gated("0.5 <= a", layers=2, submodule="residual.pre", when="generated"),
        gated("a >= 0.5", layers=3),
    )
    read, compare, logic = program.tables[Table("pre", 1)]
    assert (read.opcode, read.slot) == (Opcode.READ, 0)
    assert (compare.opcode, compare.slot, compare.lo) == (Opcode.COMPARE, 0, 0.5)
    assert (compare.function, compare.u) == (Comparison.GREATER_EQUAL, Reduce.NONE)
    assert (logic.opcode, logic.function) == (Opcode.LOGIC, ClauseKind.AND)
    assert logic.u == 0b10 | compare.bit
    assert (compare.bit, logic.bit) == (0b100, 0b1000)
    first, second = program.tables[Table("pre", 2)]
    assert (first.clause_mask, first.bit, first.counter) == (logic.bit, 0b10, 2)
    assert (second.clause_mask, second.bit, second.counter) == (logic.bit, 0b10, 3)
    (again,) = program.tables[Table("pre", 3)]
    assert (again.clause_mask, again.bit, again.counter) == (logic.bit, 0, 0)
    (last,) = program.tables[Table("pre", 4)]
    assert (last.clause_mask, last.bit, last.counter) == (compare.bit, 1, 4)
    assert [f.gated for f in program.functions] == [False, True, True, True]
    assert program.needs_every_token
    assert not program.latched


def test_reductions_and_latches_stand_at_the_front_of_a_later_table():
    program = lowered(
        READS[:2],
        gated("b(layer=0).mean > 0.1 and latch(a > 1)", layers=[2, 3]),
        gated("b(layer=0).mean > 0.1", layers=1, submodule="mlp.pre"),
        {"vector": "calm", "layers": 1, "submodule": "attention.post"},
    )
    (compare,) = entries_of(program, Opcode.COMPARE)[Table("mid", 1)]
    assert (compare.u, compare.v, compare.slot) == (Reduce.MEAN, Scope.PROMPT, 1)
    assert compare.stage is Stage.NORMED
    assert [e.opcode for e in program.tables[Table("mid", 1)]] == [
        Opcode.ADD,
        Opcode.COMPARE,
        Opcode.ADD,
    ]
    front = program.tables[Table("pre", 3)]
    assert [e.opcode for e in front] == [Opcode.LATCH, Opcode.LOGIC, Opcode.ADD]
    assert program.latched == front[0].bit
    assert front[1].u == compare.bit | front[0].bit
    assert [s.scope for s in program.scores] == [Scope.NONE, Scope.PROMPT, Scope.NONE]
    packed = pack_reads(program, 4)
    assert packed.tolist() == [0, 1, 0, 0, program.latched]
    assert program.depends_on_prompt_length


def test_what_a_latch_looks_at_is_known_a_table_before():
    program = lowered(READS[:1], gated("latch(a.max > 1 or latch(a.mean > 2))"))
    compares = entries_of(program, Opcode.COMPARE)
    latches = entries_of(program, Opcode.LATCH)
    assert list(compares) == [Table("mid", 1)]
    assert list(latches) == [Table("router", 1), Table("pre", 4)]
    assert program.latched.bit_count() == 2


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            gated("a > 0", layers=0, submodule="mlp.post"),
            r"writes\[0\]\.gate '\"a\" > 0 \(reads at residual\.post\[0\]\)' .*earlier "
            r"sites than mlp\.post\[0\].*read at an earlier site than residual\.post\[0\]",
        ),
        (
            gated("a.mean > 0", layers=[0, 3]),
            r"an earlier boundary than residual\.post\[0\]",
        ),
        (
            gated("not latch(a > 0)", layers=1, submodule="residual.pre"),
            r"an earlier boundary than residual\.pre\[1\]",
        ),
        (
            gated("latch(a.mean > 0)", layers=1, submodule="attention.post"),
            r"the gate needs a read of an earlier boundary",
        ),
        (gated("c > 0 and a > 0", layers=0), r"earlier sites than residual\.post\[0\]"),
    ],
)
def test_a_gate_on_what_is_not_known_yet_is_refused(write, message):
    with pytest.raises(SpecError, match=message):
        lowered(READS, write)


def test_the_same_value_is_read_before_it_is_written():
    assert lowered(READS, gated("a > 0", layers=0))
    assert lowered(READS, gated("a > 0", layers=1, submodule="residual.pre"))
    late = {"read": "norm", "name": "x", "layers": 1, "submodule": "residual.pre"}
    with pytest.raises(SpecError, match=r"earlier sites than residual\.post\[0\]"):
        lowered([late], gated("x > 0", layers=0))


def test_reads_have_gates_too():
    capture = {"read": "capture", "layers": 0, "gate": "a > 0", "when": "prompt"}
    program = lowered([READS[0], capture])
    opcodes = [e.opcode for e in program.tables[Table("pre", 1)]]
    assert opcodes == [Opcode.READ, Opcode.COMPARE, Opcode.LOGIC, Opcode.CAPTURE]
    entry = program.tables[Table("pre", 1)][-1]
    assert (entry.counter, entry.bit) == (2, 0b10)
    outcome = run(program, VECTORS, range(TOKENS), 6, [TOKENS])
    expected = {(0, t) for t in range(6) if outcome.score[t, 0] > 0}
    assert set(outcome.captured) == expected
    with pytest.raises(SpecError, match=r"reads\[0\]\.gate .*declare that read first"):
        lowered([capture, READS[0]])


def test_a_gate_that_is_always_or_never_open():
    always, never = (
        lowered(READS, gated("a > 0 or not a > 0")),
        lowered(READS, gated("a > 0 and not a > 0")),
    )
    for program, kind in ((always, ClauseKind.ALL), (never, ClauseKind.FALSE)):
        assert not entries_of(program, Opcode.COMPARE)
        (entry,) = program.tables[Table("pre", 4)]
        assert program.clauses[entry.clause_mask.bit_length() - 1].kind is kind
        assert entry.counter == 1 + len(READS)
    outcome = run(never, VECTORS, range(TOKENS), 4, [TOKENS])
    assert outcome.counts[:, len(READS)].tolist() == [0, TOKENS]


def test_conditions_and_gates_share_32_bits():
    def compare(count):
        return " and ".join(f"a > {i}" for i in range(count))

    assert lowered(READS[:1], gated(compare(30)))
    with pytest.raises(
        SpecError, match=r"writes\[0\]\.gate .*at most 32 .*gates count"
    ):
        lowered(READS[:1], gated(compare(31)))


def test_all_gates_of_a_request_are_limited():
    long = [gated(f"a > {i} or " + "not a > 1 or " * 110 + "a > 1") for i in range(3)]
    with pytest.raises(SpecError, match=r"gates '\d+ characters in 3 different gates'"):
        lowered(READS[:1], *long)
    assert lowered(READS[:1], *[long[0]] * 9)


@pytest.mark.parametrize(
    ("text", "marked", "why"),
    [
        ("", 0, "cannot be read here"),
        ("a >", 3, "cannot be read here"),
        ("a > 0 and", 9, "cannot be read here"),
        ("a", 0, "compare this with a number"),
        ("b(layer=0).mean", 0, "compare this with a number"),
        ("a > 0 and a", 10, "compare this with a number"),
        ("a > b(layer=0)", 4, "compare a score with a number"),
        ("0 < 1", 0, "not a score"),
        ("0 < a < 1", 8, "one comparison at a time"),
        ("a == 0", 0, "compare with < <= > or >="),
        ("a > 0 and a is 1", 10, "compare with < <= > or >="),
        ("a > True", 4, "compare a score with a number"),
        ("a > 1j", 4, "compare a score with a number"),
        ("a > 1e999", 4, "numbers go up to 3.4e+38"),
        ("a > -" + "9" * 400, 4, "numbers go up to 3.4e+38"),
        ("a > nan", 4, "compare a score with a number"),
        ("a.median > 0", 0, "only .mean, .max and .last"),
        ("a.mean.max > 0", 0, "not a score"),
        ("a + 1 > 0", 0, "not a score"),
        ("abs(a) > 0", 0, "expected (layer=N)"),
        ("b(0) > 0", 0, "expected (layer=N)"),
        ("b(layer=0.5) > 0", 0, "expected (layer=N)"),
        ("b > 0", 0, "say which: b(layer=N), one of 0, 1"),
        ("b(layer=2) > 0", 0, "it reads at 0, 1, not at layer 2"),
        ("b(layer=9) > 0", 0, "layers are 0..3"),
        ("b(layer=1)[1] > 0", 0, "it has the features 0..0"),
        ("a[-1] > 0", 2, "expected a feature's index"),
        ("a > 0 and bb(layer=0) > 0", 10, "unknown read, did you mean b?"),
        ("zzz > 0", 0, "unknown read: there are a (dot at 0), b (cosine at 0, 1), c ("),
        ("dot > 0", 0, "say which: dot(layer=N)"),
        ("dot(layer=1) > 0", 0, "no dot at layer 1: there are a (dot at 0)"),
        ("latch", 0, "needs a gate"),
        ("latch() and a > 0", 0, "needs a gate"),
        ("latch(a) and a > 0", 6, "compare this with a number"),
        ("latch(latch(latch(a > 0)))", 12, "no third one"),
        ("lambda: a", 0, "not a comparison"),
        ("a > 0 if a > 1 else a > 2", 0, "not a comparison"),
        ("a > 0\\", 5, "unexpected character"),
        ("a\x00 > 0", 1, "unexpected character"),
        ("\ud800 > 0", 0, "unexpected character"),
        ("'größe' > 0 and bogus > 0", 16, "unknown read"),
        ("not " * 40 + "a > 0", 132, "nested more than 32"),
    ],
)
def test_errors_mark_the_place(text, marked, why):
    reads = [*READS, {"read": "norm", "name": "größe", "layers": 0}]
    with pytest.raises(SpecError) as caught:
        lowered(reads, gated(text))
    message = str(caught.value)
    assert message.startswith("writes[0].gate ")
    mark = message.splitlines()[-1]
    assert why in mark
    assert mark.index("^") - 2 == min(marked, 60)


def test_a_long_gate_is_refused():
    with pytest.raises(SpecError, match="at most 2000 characters"):
        check_gate("a > 0 or " * 300 + "a > 0")


def test_names_that_are_no_python_names():
    reads = [
        {"read": "norm", "name": "my-read", "layers": 0},
        {"read": "norm", "layers": [0, 1]},
        {"read": "sae", "name": "f's", "weight": "up", "layers": 0},
    ]
    gate = '\'my-read\' > 0 and "reads/1"(layer=-3).max > 1 and "f\'s"[2] > 2'
    request = parse_request(
        {"eyesplice": {"reads": reads, "writes": [gated(gate)]}}, CONTEXT
    )
    assert request.writes[0].gate == (
        '"my-read" > 0 and "reads/1"(layer=1).max > 1 and "f\'s"[2] > 2'
    )
    program = lowered(reads, gated(gate))
    compares = [
        e for found in entries_of(program, Opcode.COMPARE).values() for e in found
    ]
    assert sorted(e.slot for e in compares) == [0, 2, 5]
    with pytest.raises(SpecError, match="say which of 3 features"):
        lowered(reads, gated('"f\'s" > 0'))


def test_a_capture_has_no_score():
    with pytest.raises(SpecError, match="a capture has no score"):
        lowered([{"read": "capture", "name": "x", "layers": 0}], gated("x > 0"))


def test_two_reads_of_a_kernel_at_one_layer():
    two = [READS[0], {**READS[0], "name": "e"}]
    with pytest.raises(
        SpecError, match=re.escape("more than one dot at layer 0: there")
    ):
        lowered(two, gated("dot(layer=0) > 0"))


@settings(deadline=None)
@given(
    st.text(max_size=60)
    | st.text("()<>=.-:09 abrelnoty[]\"'", max_size=60)
    | st.lists(
        st.sampled_from(
            [
                *[
                    "a",
                    "b(layer=0)",
                    ">",
                    "<",
                    "<=",
                    "0",
                    "-1.5",
                    "and",
                    "or",
                    "not",
                    "(",
                    ")",
                    "latch(",
                    ".mean",
                    "[0]",
                    "'",
                    ";",
                ]
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_any_text_is_a_gate_or_refused(text):
    with suppress(SpecError):
        lowered(READS, gated(text))
