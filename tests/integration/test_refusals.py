"""A request that cannot be served as written is refused, and nobody else notices."""

import json

import pytest

from eyesplice import SpecError
from tests.engine import Ask, Engine, asking, assert_same, prompt, write

pytestmark = pytest.mark.engine

GOOD = Ask(prompt(7), asking(write("v0", [1], scale=2.0)))
PLAIN = Ask(prompt(9, 1))
FINE = write("v0", [1])

REFUSED: dict[str, tuple[object, tuple[str, ...]]] = {
    # The request, and the thing, the value, what is allowed and the remedy.
    "an unknown vector": (
        asking(write("layerd", [1])),
        ("writes[0].vector", "'layerd'", "v0, v1", "write layered"),
    ),
    "a layer out of range": (
        asking(FINE, write("v0", [4])),
        ("writes[1].layers", " 4", "0..3", "which has 4"),
    ),
    "a wrong key": (
        asking({**FINE, "scal": 1.0}),
        ("writes[0].scal", " 1.0", "keys write, name", "write scale"),
    ),
    "a scale that is not a number": (
        asking(write("v0", [1], scale=float("nan"))),
        ("writes[0].scale", "nan", "finite numbers", "plain JSON"),
    ),
    "NaN in JSON text": (
        '{"writes": [{"vector": "v0", "layers": [1], "scale": NaN}]}',
        ("eyesplice", "NaN", "JSON", "correct the JSON text"),
    ),
    "a scale that is text": (
        asking(write("v0", [1], scale="2")),
        ("writes[0].scale", "'2'", "a number", "correct scale"),
    ),
    "a list where an object belongs": (
        [FINE],
        ("eyesplice", "[{'vector': 'v0'", "an object", "send an object"),
    ),
    "a list for a write": (
        {"writes": [[1]]},
        ("writes[0]", "[1]", "an object", "send an object"),
    ),
    "no layers": (
        asking({"vector": "v0"}),
        ("layers", "None", "0..3", "name the decoder layers"),
    ),
    "a site that is not armed": (
        asking(write("v0", [1], "attention.heads")),
        ("writes[0] ", "attention.heads[1]", "residual.post[0-3]", "`sites: ["),
    ),
    "a site that does not exist": (
        asking(write("v0", [1], "residual.last")),
        ("submodule", "'residual.last'", "residual.post", "use one of these names"),
    ),
    "an unknown condition": (
        asking(write("v0", [1], when="sometimes")),
        ("when", "sometimes", "last_token", "correct the marked place"),
    ),
    "an unknown kernel": (
        asking(write("v0", [1], write="ablat")),
        ("writes[0].write", "'ablat'", "steering_vector", "write ablate"),
    ),
    "a vector of another width": (
        asking(write("experts", [1])),
        ("vector", "experts of shape [4]", "rows of 128", "made for this model"),
    ),
    "more entries than a table has room for": (
        asking(*[write("v0", [1], scale=float(n + 1)) for n in range(9)]),
        ("writes at", "'9 entries'", "at most 8", "max_entries"),
    ),
    "more writes than a request may have": (
        asking(*[FINE] * 257),
        ("writes", "characters", "at most 256", "correct writes"),
    ),
    "an app, where none is deployed": (
        "guarded",
        ("eyesplice", "'guarded'", "none are deployed", "name a deployed app"),
    ),
}


@pytest.fixture(scope="module")
def before(llama: Engine):
    return llama.ask(GOOD, PLAIN)


@pytest.mark.parametrize("case", REFUSED)
def test_the_refusal_names_thing_value_allowed_and_remedy(
    case: str, llama: Engine, before
):
    spec, words = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        llama.ask(GOOD, Ask(prompt(5), spec), PLAIN)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    thing, rest = message.split(" refused. Allowed: ", 1)
    allowed, remedy = rest.rsplit("Do: ", 1)
    for word, part in zip(words, (thing, thing, allowed, remedy), strict=True):
        assert word in part, f"{word!r} not in {part!r} of {message!r}"
    for answer, first in zip(llama.ask(GOOD, PLAIN), before, strict=True):
        assert_same(answer, first)


def test_a_refused_request_leaves_nothing_behind(llama: Engine):
    for spec, _ in REFUSED.values():
        with pytest.raises(SpecError):
            llama.ask(Ask(prompt(5), spec))
    assert llama.llm.llm_engine.get_num_unfinished_requests() == 0
    llama.ask(PLAIN)
    assert llama.router.live_programs == 0


def test_off_and_text_are_as_good_as_nothing_and_an_object(llama: Engine, before):
    off, text = llama.ask(
        Ask(PLAIN.prompt, "off"), Ask(GOOD.prompt, json.dumps(GOOD.spec))
    )
    assert_same(text, before[0])
    assert_same(off, before[1])
