"""Apps in requests: by name, with other numbers, by default, and off."""

import pytest

from eyesplice import SpecError
from eyesplice.fx_passes.context import TokenSet
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import Request, parse_canonical, parse_request
from tests import request_world

CONTEXT = request_world.context()


def parse(value):
    return parse_request({"eyesplice": value}, CONTEXT)


def test_a_name_an_object_and_nothing():
    request = parse("guarded")
    assert parse({"apps": {"guarded": {}}}) == request
    assert parse('{"apps": {"guarded": {}}}') == request
    assert request.apps == ("guarded",)
    truth, probe, steer, soft = request.functions
    assert (truth.name, truth.weight, truth.bias) == (
        *("guarded/truth", "guarded/w"),
        -0.3,
    )
    assert (probe.name, probe.weight, probe.over) == (
        *("guarded/1", "guarded/weight"),
        "prompt",
    )
    assert (steer.name, steer.vector, steer.scale) == (
        *("guarded/2", "guarded/v"),
        1.5,
    )
    assert steer.when == 'token_in("guarded/triggers") or generated'
    assert steer.gate == '"guarded/truth" >= 0 and "guarded/1".mean < 2'
    assert (soft.name, soft.vector, soft.app) == (
        *("guarded/soft", "guarded/vector"),
        "guarded",
    )
    assert parse_canonical(request.canonical(), CONTEXT) == request
    assert parse({"apps": {}}) == Request()


def test_an_app_beside_functions_of_the_request():
    request = parse(
        {
            "apps": {"guarded": {}},
            "reads": [{"read": "norm", "layers": 0}],
            "writes": [
                {"vector": "calm", "layers": 2, "gate": "'guarded/truth' > 0"},
                {"vector": "calm", "layers": 2, "gate": "norm(layer=0) > 1"},
            ],
        }
    )
    names = [f.name for f in lower(request, CONTEXT).functions]
    assert names[-4:] == ["guarded/soft", "reads/0", "writes/0", "writes/1"]
    assert request.writes[-1].gate == '"reads/0" > 1'
    assert parse_canonical(request.canonical(), CONTEXT) == request
    with pytest.raises(SpecError, match=r"(?s)writes\[0\]\.gate .*there are guarded/"):
        parse(
            {
                "apps": {"guarded": {}},
                "writes": [{"vector": "calm", "layers": 2, "gate": "truth > 0"}],
            }
        )


def test_overrides():
    request = parse({"apps": {"guarded": {"scale": 2, "bias": 0.5}}})
    assert [w.scale for w in request.writes] == [2.0, 2.0]
    assert [r.bias for r in request.reads] == [0.5, 0.5]
    own = {
        "scale": 3,
        "functions": {"soft": {"scale": 0.5, "hi": 2}, "0": {"bias": 1}},
    }
    request = parse({"apps": {"guarded": own}})
    assert [w.scale for w in request.writes] == [3.0, 0.5]
    assert request.writes[1].hi == 2.0
    assert [r.bias for r in request.reads] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"scal": 1},
            r"apps\.guarded\.scal 1 .*scale, bias, lo, hi, functions.*did",
        ),
        (
            {"value": 1},
            r"apps\.guarded\.value 1 .*overrides scale, bias, lo, hi, fun",
        ),
        ({"layers": 1}, r"apps\.guarded\.layers 1 "),
        ({"scale": "2"}, r"guarded/2\.scale '2' .*a number"),
        ({"lo": 3, "hi": 2}, r"guarded/soft\.lo 3\.0 .*at most hi"),
        (
            {"functions": 3},
            r"apps\.guarded\.functions 3 .*an object from functions",
        ),
        (
            {"functions": {"sof": {}}},
            r"functions 'sof' .*truth, 1, 2, soft.*did you",
        ),
        ({"functions": {"soft": 1}}, r"functions\.soft 1 .*an object of overrides"),
        (
            {"functions": {"truth": {"scale": 1}}},
            r"functions\.truth\.scale 1 .*the overrides bias",
        ),
    ],
)
def test_overrides_that_fit_nothing_are_refused(overrides, message):
    with pytest.raises(SpecError, match=message):
        parse({"apps": {"guarded": overrides}})


def test_default_apps_are_those_of_requests_that_name_none():
    context = request_world.context(default_apps=("guarded", "asleep"))
    default = parse_request(None, context)
    assert default == parse("guarded")
    for args in ({}, {"other": 1}, {"eyesplice": None}, {"eyesplice": {}}):
        assert parse_request(args, context) == default
    assert parse_request({"eyesplice": "off"}, context) is None
    assert parse_request({"eyesplice": {"apps": {}}}, context) == Request()
    entry = {"id": "calm", "layer": 2}
    beside = parse_request({"hotwire": entry}, context)
    assert beside.functions == (
        *default.functions,
        *parse_request({"hotwire": entry}, CONTEXT).writes,
    )


def test_token_sets_are_part_of_the_digest():
    request = parse("guarded")
    digest = request.digest(CONTEXT.vectors, CONTEXT.token_sets)
    changed = {**CONTEXT.token_sets, "guarded/triggers": TokenSet(3, "sha256:new")}
    assert request.digest(CONTEXT.vectors, changed) != digest
    with pytest.raises(SpecError, match="token set 'guarded/triggers' refused"):
        request.digest(CONTEXT.vectors)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"apps": [], "functions": 3, "stream_scores": false}',
        '{"apps": [], "functions": [3], "stream_scores": false}',
        '{"apps": [], "functions": [{}], "stream_scores": false}',
    ],
)
def test_other_texts_are_not_canonical(text):
    with pytest.raises(SpecError):
        parse_canonical(text, CONTEXT)


def test_a_canonical_text_may_be_longer_than_a_request():
    request = parse("guarded")
    text = request.canonical() + " " * 2**20
    assert parse_canonical(text, CONTEXT) == request
