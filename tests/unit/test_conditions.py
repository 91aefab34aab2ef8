"""The `when` language against Python's own meaning of and, or, not and slices."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyesplice import SpecError
from eyesplice.fx_passes.conditions import ClauseBuilder, normalise, parse_condition
from eyesplice.fx_passes.program import Clause, pack_clauses
from eyesplice.ops import reference
from eyesplice.ops.layout import INT32_MAX, MAX_CLAUSES, ClauseKind

TOKENS = 14


def tokens_where(text: str, prompt_len: int) -> list[bool]:
    """What `route_` selects for one request of TOKENS tokens."""
    builder = ClauseBuilder()
    index = builder.add(text)
    clauses = torch.stack([pack_clauses([]), pack_clauses(builder.clauses)])
    rows, select = torch.zeros(2, TOKENS, dtype=torch.int32)
    reference.route_(
        rows,
        select,
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([prompt_len], dtype=torch.int32),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS),
        clauses,
        1,
        TOKENS,
    )
    return ((select.long() >> index) & 1).bool().tolist()


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
    ],
)
def test_tokens(text, positions):
    chosen = [p in positions for p in range(TOKENS)]
    assert tokens_where(text, prompt_len=9) == chosen


@st.composite
def conditions(draw, depth=3):
    """A condition and the Python function of (position, prompt length) it means."""
    kind = draw(st.sampled_from(["name", "slice", "one", "not", "and", "or"]))
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
    left, f = draw(conditions(depth=depth - 1))
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
        ("prompt and token_in(x)", 11, "not in this version"),
        ("after(token_in([1]))", 0, "not in this version"),
        ("not " * 40 + "all", 132, "nested more than 32"),
    ],
)
def test_errors_mark_the_place(text, marked, why):
    with pytest.raises(SpecError) as caught:
        parse_condition(text)
    message = str(caught.value)
    line, mark = message.splitlines()[-2:]
    assert why in mark
    assert mark.index("^") - 2 == min(marked, 60)
    assert line[2:].startswith(normalise(text)[max(0, marked - 60) : marked])
    assert "last_token and positions(a:b)" in message


@pytest.mark.parametrize("deep", ["(" * 999 + "all" + ")" * 900, "not " * 499 + "all"])
def test_deep_nesting_is_refused(deep):
    with pytest.raises(SpecError):
        parse_condition(deep)


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
                ":",
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_any_text_is_a_condition_or_refused(text):
    with suppress(SpecError):
        ClauseBuilder().add(text)
