"""The `when` language against Python's own meaning of and, or, not and slices."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyesplice import SpecError
from eyesplice.fx_passes.conditions import (
    ClauseBuilder,
    TokenNames,
    check_condition,
    normalise,
    parse_condition,
    resolve_condition,
    token_sets_of,
)
from eyesplice.fx_passes.context import TokenSet
from eyesplice.fx_passes.program import Clause, Program, pack_clauses
from eyesplice.ops.layout import INT32_MAX, MAX_CLAUSES, MAX_TOKEN_IDS, ClauseKind
from tests import request_world
from tests.program_runner import run

TOKENS = 14
IDS = [7, 3, 9, 7, 1, 0, 500, 3, 31, 32, 999, 7, 2, 3]
SETS = {
    "evens": TokenSet(1, "sha256:evens"),
    "app/evens": TokenSet(2, "sha256:app"),
    "app/odd set": TokenSet(3, "sha256:odd"),
}
MEMBERS = [[], [0, 2, 32, 500], [9, 999], [1, 31]]
NAMES = TokenNames(SETS, "app", 1000)


def token_sets() -> torch.Tensor:
    rows = torch.zeros(len(MEMBERS), 32, dtype=torch.int64)
    for row, members in enumerate(MEMBERS):
        for token in members:
            rows[row, token // 32] |= 1 << token % 32
    return torch.where(rows >= 2**31, rows - 2**32, rows).int()


def tokens_where(
    text: str, prompt_len: int, steps=(TOKENS,), names=NAMES
) -> list[bool]:
    """What `route_` selects for one request of TOKENS tokens."""
    builder = ClauseBuilder(names=names)
    index = builder.add(text)
    program = Program(
        "", tuple(builder.clauses), {}, token_ids=tuple(builder.token_ids)
    )
    vectors = request_world.Vectors({})
    outcome = run(program, vectors, IDS, prompt_len, steps, token_sets())
    return [bool(word >> index & 1) for word in outcome.select]


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("all", range(14)),
        ("prompt", range(9)),
        ("generated", range(9, 14)),
        ("last_token", [8]),
        ("positions(2:5)", [2, 3, 4]),
        ("positions( 2 : 5 )", [2, 3, 4]),
        ("positions (+2:-5)", [2, 3]),
        ("positions(:)", range(14)),
        ("positions(3:)", range(3, 14)),
        ("positions(:3)", [0, 1, 2]),
        ("positions(-2:)", range(7, 14)),
        ("positions(:-7)", [0, 1]),
        ("positions(-3:-1)", [6, 7]),
        ("positions(-100:2)", [0, 1]),
        ("positions(5:3)", []),
        ("positions(5)", [5]),
        ("positions(0)", [0]),
        ("positions(-0)", [0]),
        ("positions(-1)", [8]),
        ("positions(-9)", [0]),
        ("positions(-10)", []),
        (f"positions({INT32_MAX})", []),
        (f"positions(-{INT32_MAX}:{INT32_MAX})", range(14)),
        ("not prompt", range(9, 14)),
        ("not not prompt", range(9)),
        ("not all", []),
        ("prompt and not last_token", range(8)),
        ("generated or last_token", range(8, 14)),
        ("last_token or prompt and positions(:2)", [0, 1, 8]),
        ("(last_token or prompt) and positions(:2)", [0, 1]),
        ("not (positions(0) or positions(5))and prompt", [1, 2, 3, 4, 6, 7, 8]),
        ("  prompt\n and\tprompt ", range(9)),
        ("token_in(7)", [0, 3, 11]),
        ("token_in (3, 7)", [0, 1, 3, 7, 11, 13]),
        ("token_in( [ 999,0 , 0, ] )", [5, 10]),
        ("token_in(4)", []),
        ("token_in(evens)", [2, 10]),
        ("token_in('odd set') or token_in(\"app/evens\")", [2, 4, 8, 10]),
        ("not token_in(7) and prompt", [1, 2, 4, 5, 6, 7, 8]),
        ("after(token_in(9))", range(3, 14)),
        ("after(prompt)", range(1, 14)),
        ("after(after(token_in(9)))", range(4, 14)),
        ("after(not prompt and token_in(7))", [12, 13]),
        ("generated and not after(token_in(999))", [9, 10]),
        ("after(token_in(123))", []),
    ],
)
def test_tokens(text, positions):
    chosen = [p in positions for p in range(TOKENS)]
    assert tokens_where(text, prompt_len=9) == chosen
    assert tokens_where(text, 9, (4, 1, 6, 1, 2)) == chosen
    resolved = resolve_condition(text, NAMES)
    assert tokens_where(resolved, 9, names=TokenNames(SETS, None, 1000)) == chosen
    assert resolve_condition(resolved, TokenNames(SETS, None, 1000)) == resolved


@st.composite
def conditions(draw, depth=3):
    """A condition and the Python function of (position, prompt length) it means."""
    kind = draw(
        st.sampled_from(["name", "slice", "one", "ids", "after", "not", "and", "or"])
    )
    if depth == 0 or kind == "name":
        return draw(
            st.sampled_from(
                [
                    ("all", lambda p, n: True),
                    ("prompt", lambda p, n: p < n),
                    ("generated", lambda p, n: p >= n),
                    ("last_token", lambda p, n: p == n - 1),
                ]
            )
        )
    if kind == "slice":
        a, b = draw(st.tuples(*[st.none() | st.integers(-16, 16)] * 2))
        text = f"positions({'' if a is None else a}:{'' if b is None else b})"

        def inside(p, n):
            start = 0 if a is None else a + n * (a < 0)
            stop = 10**6 if b is None else b + n * (b < 0)
            return start <= p < stop

        return text, inside
    if kind == "one":
        a = draw(st.integers(-16, 16))
        return f"positions({a})", lambda p, n: p == a + n * (a < 0)
    if kind == "ids":
        ids = draw(st.lists(st.sampled_from(sorted({*IDS, 8})), min_size=1, max_size=4))
        return f"token_in({ids})", lambda p, n: IDS[p] in ids
    left, f = draw(conditions(depth=depth - 1))
    if kind == "after":
        return f"after({left})", lambda p, n: any(f(q, n) for q in range(p))
    if kind == "not":
        return f"not ({left})", lambda p, n: not f(p, n)
    right, g = draw(conditions(depth=depth - 1))
    if kind == "and":
        return f"({left}) and ({right})", lambda p, n: f(p, n) and g(p, n)
    return f"({left}) or ({right})", lambda p, n: f(p, n) or g(p, n)


@settings(deadline=None)
@given(conditions(), st.integers(1, TOKENS))
def test_any_condition_means_what_python_means(condition, prompt_len):
    text, truth = condition
    assert tokens_where(text, prompt_len) == [
        truth(p, prompt_len) for p in range(TOKENS)
    ]


def test_clauses_are_shared():
    builder = ClauseBuilder()
    first = builder.add("prompt and not last_token")
    assert builder.clauses == [
        Clause(ClauseKind.PROMPT),
        Clause(ClauseKind.LAST),
        Clause(ClauseKind.NOR, 0b10),
        Clause(ClauseKind.AND, 0b101),
    ]
    assert builder.add("(not last_token) and prompt") == first
    assert builder.add("prompt or prompt") == 0
    assert builder.add("not not last_token") == 1
    assert len(builder.clauses) == 4


def test_all_32_clauses_work_and_one_more_is_refused():
    builder = ClauseBuilder()
    for p in range(MAX_CLAUSES - 1):
        assert builder.add(f"positions({p})") == p
    everything = " or ".join(f"positions({p})" for p in range(MAX_CLAUSES - 1))
    assert builder.add(everything) == MAX_CLAUSES - 1
    assert pack_clauses(builder.clauses)[-1].tolist() == [7, 2**31 - 1, 0, 0]
    with pytest.raises(SpecError, match="at most 32 different conditions"):
        builder.add("generated")
    assert builder.add("positions(3)") == 3


def test_bit_31_of_a_mask_survives():
    packed = pack_clauses([Clause(ClauseKind.NOR, 1 << 31)])
    assert packed[0].tolist() == [ClauseKind.NOR, -(2**31), 0, 0]


@pytest.mark.parametrize(
    ("text", "marked", "why"),
    [
        ("", 0, "cannot be read here"),
        ("prompt and", 10, "cannot be read here"),
        ("prompt and bogus", 11, "unknown name"),
        ("promt", 0, "did you mean prompt?"),
        ("prompt and True", 11, "not a condition"),
        ("prompt and 5", 11, "not a condition"),
        ("prompt & all", 7, "unexpected character"),
        ("prompt == all", 7, "unexpected character"),
        ("probe >= 0", 6, "unexpected character"),
        ("all # prompt", 4, "unexpected character"),
        ("all\x00", 3, "unexpected character"),
        ("all or \uff41ll", 7, "unexpected character"),
        ("all or \ud800", 7, "unexpected character"),
        ("all()", 0, "not a condition"),
        ("-prompt", 0, "not a condition"),
        ("not (all + all)", 5, "not a condition"),
        ("all if prompt else all", 0, "not a condition"),
        ("lambda: all", 0, "not a condition"),
        ("all is not prompt", 0, "not a condition"),
        ("import os", 0, "cannot be read here"),
        ("positions", 0, "needs positions"),
        ("all and positions", 8, "needs positions"),
        ("positions()", 10, "expected whole numbers"),
        ("positions(a:b)", 10, "expected whole numbers"),
        ("positions(1:2:3)", 10, "expected whole numbers"),
        ("positions(0x1)", 10, "expected whole numbers"),
        ("positions(1)(2)", 0, "not a condition"),
        ("positions(1) 5", 13, "cannot be read here"),
        ("positions[1:2]", 9, "unexpected character"),
        ("xpositions(1)", 0, "not a condition"),
        ("positions(2147483648)", 10, "positions go up to 2147483647"),
        ("positions(:-2147483648)", 10, "positions go up to 2147483647"),
        ("positions(" + "9" * 1900 + ")", 10, "positions go up to 2147483647"),
        ("prompt and token_in(x)", 20, "unknown token set"),
        ("token_in(even)", 9, "did you mean evens?"),
        ("token_in('a b')", 9, "unknown token set"),
        ("prompt and token_in()", 20, "expected a token set's name, or token ids"),
        ("token_in(-1)", 9, "expected a token set's name, or token ids"),
        ("token_in([1, 2)", 9, "expected a token set's name, or token ids"),
        ("token_in([1], [2])", 9, "expected a token set's name, or token ids"),
        ("token_in(evens, 2)", 9, "expected a token set's name, or token ids"),
        ("token_in(1.5)", 9, "expected a token set's name, or token ids"),
        ("token_in(1000)", 9, "token ids of this model go up to 999"),
        ("all and token_in", 8, "needs a token set"),
        ("after", 0, "needs a condition"),
        ("after()", 0, "not a condition"),
        ("all or after(all, all)", 16, "unexpected character"),
        ("after(x)", 6, "unknown name"),
        ("after(all", 5, "cannot be read here"),
        ("not " * 40 + "all", 132, "nested more than 32"),
    ],
)
def test_errors_mark_the_place(text, marked, why):
    with pytest.raises(SpecError) as caught:
        parse_condition(text, NAMES)
    message = str(caught.value)
    line, mark = message.splitlines()[-2:]
    assert why in mark
    assert mark.index("^") - 2 == min(marked, 60)
    assert line[2:].startswith(normalise(text)[max(0, marked - 60) : marked])
    assert "last_token and positions(a:b)" in message
    if not why.startswith(("unknown token set", "did you mean evens", "token ids of")):
        with pytest.raises(SpecError):
            check_condition(text)


@pytest.mark.parametrize("deep", ["(" * 999 + "all" + ")" * 900, "not " * 499 + "all"])
def test_deep_nesting_is_refused(deep):
    with pytest.raises(SpecError):
        parse_condition(deep)


def test_token_ids_are_shared_and_limited():
    builder = ClauseBuilder()
    first = builder.add("token_in([5, 6, 7])")
    assert builder.add("token_in(7, 5, 6)") == first
    assert builder.add("token_in(6, 7)") != first
    assert builder.clauses[1] == Clause(ClauseKind.TOKEN_LIST, 1, 3)
    assert builder.token_ids == [5, 6, 7]
    builder.add(f"token_in({list(range(100, 100 + MAX_TOKEN_IDS - 3))})")
    with pytest.raises(
        SpecError, match=r"at most 64 listed.*Do: name a token set of an"
    ):
        builder.add("token_in(1)")


def test_token_sets_of_a_condition():
    when = resolve_condition("token_in(evens) and not token_in('odd set')", NAMES)
    assert when == 'token_in("app/evens") and not token_in("app/odd set")'
    assert list(token_sets_of(when)) == ["app/evens", "app/odd set"]
    assert list(token_sets_of("token_in(3, 4) or positions(2)")) == []
    other = TokenNames(SETS, "other")
    assert resolve_condition("token_in(evens)", other) == 'token_in("evens")'
    check_condition("token_in(whatever) and after(token_in(12345678))")


def test_long_conditions_are_refused():
    with pytest.raises(SpecError, match="at most 2000 characters"):
        parse_condition("all or " * 300 + "all")


@settings(deadline=None)
@given(
    st.text(max_size=60)
    | st.text("()+-:09 apositnsdr", max_size=60)
    | st.lists(
        st.sampled_from(
            [
                "all",
                "prompt",
                "and",
                "or",
                "not",
                "(",
                ")",
                "positions(1:2)",
                "positions(",
                "token_in(1,",
                "after(",
                ":",
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_any_text_is_a_condition_or_refused(text):
    with suppress(SpecError):
        ClauseBuilder().add(text)
