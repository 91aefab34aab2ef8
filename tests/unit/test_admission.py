"""What the front end makes of a request, for stand-ins of vLLM's objects."""

import copy
import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

import eyesplice
from eyesplice import App, SpecError
from eyesplice.integration import beams, frontend, known_requests
from eyesplice.integration.deployment import Deployment
from eyesplice.integration.frontend import FrontEnd
from eyesplice.integration.known_requests import asked_for
from tests.deployment_world import HIDDEN, all_armed, steer, vllm_config

OFF = "off"
PLAIN = {"other": 1}


def watch():
    read = eyesplice.read("dot", weight=torch.ones(HIDDEN)).layers(2)
    return App("watch", [read])


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Makes front ends of engines with the apps `steer` and `watch`."""
    monkeypatch.setattr(Deployment, "read_report", all_armed)

    def make(**config):
        for app in (steer(), watch()):
            app.save(tmp_path / app.name)
        config["apps"] = [str(tmp_path / "steer"), str(tmp_path / "watch")]
        return FrontEnd(vllm_config(additional_config={"eyesplice": config}))

    return make


def params(**extra_args):
    return SimpleNamespace(extra_args=extra_args or None, max_tokens=1)


def core_request(**kind):
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        cache_salt=None,
        sampling_params=SimpleNamespace(
            extra_args=None, skip_reading_prefix_cache=None
        ),
        **kind,
    )


@pytest.fixture
def remembered(monkeypatch):
    """What was remembered, in order."""
    found = []
    monkeypatch.setattr(
        frontend.answers, "remember", lambda *args, **kw: found.append((*args, kw))
    )
    return found


def process(front, given, cache_salt=None):
    processor = SimpleNamespace(_eyesplice_front=front)

    def original(_processor, _id, _prompt, params):
        request = core_request()
        request.cache_salt = cache_salt
        request.sampling_params.extra_args = copy.deepcopy(params.extra_args)
        return request

    return frontend.process_inputs(original, processor, "r", "prompt", given)


def functions(request):
    text = request.sampling_params.extra_args["eyesplice"]
    return [entry["name"] for entry in json.loads(text)["functions"]]


def test_a_request_without_our_key_is_left_alone(opened, remembered):
    front = opened()
    assert not front.concerns(params())
    assert not front.concerns(params(**PLAIN))
    request = process(front, params(**PLAIN))
    assert request.sampling_params.extra_args == PLAIN
    assert request.cache_salt is None and not remembered


@pytest.mark.parametrize("by_name", [False, True])
def test_the_processor_copies_our_text_and_the_caller_keeps_what_it_gave(
    opened, remembered, by_name
):
    asked = {"reads": [{"read": "capture", "layers": [0], "submodule": "residual.mid"}]}
    given = params(eyesplice=asked, **PLAIN)
    before, copied = copy.deepcopy(given.extra_args), []

    def original(_processor, _id, _prompt, params):
        copied.append(params.extra_args)
        request = core_request()
        request.sampling_params.extra_args = copy.deepcopy(params.extra_args)
        return request

    processor = SimpleNamespace(_eyesplice_front=opened())
    args, kwargs = (
        (("r", "p"), {"params": given}) if by_name else (("r", "p", given), {})
    )
    request = frontend.process_inputs(original, processor, *args, **kwargs)
    assert copied == [request.sampling_params.extra_args]
    assert isinstance(copied[0]["eyesplice"], str) and copied[0] == {
        **PLAIN,
        "eyesplice": remembered[0][2].canonical(),
    }
    assert remembered[0][3]["text"] == copied[0]["eyesplice"]
    assert given.extra_args == before


def test_a_steered_request(opened, remembered):
    request = process(opened(), params(eyesplice="steer", **PLAIN))
    assert functions(request) == ["steer/0"]
    assert request.sampling_params.extra_args["other"] == 1
    assert request.cache_salt.startswith("|eyesplice:sha256:")
    assert request.sampling_params.skip_reading_prefix_cache is None
    ((name, program, asked, more),) = remembered
    assert (name, asked.apps) == ("r", ("steer",)) and program.changes_kv
    assert more == {"vectors": {}, "text": asked.canonical()}


def test_beams_wait_until_no_app_is_a_default(opened):
    front = opened(default=["steer"])
    processor = SimpleNamespace(_eyesplice_front=front)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(input_processor=processor))
    server = SimpleNamespace(engine_client=SimpleNamespace(input_processor=processor))
    ways = ((beams._offline, llm), (beams._online, server))

    def search(owner, prompts):
        return f"beams of {prompts}"

    for way, owner in ways:
        with pytest.raises(SpecError, match=r"beam search.*default apps: steer"):
            way(search, owner, "prompts")
    front.disable("steer")
    for way, owner in ways:
        assert way(search, owner, "prompts") == "beams of prompts"


@pytest.mark.parametrize(
    ("xargs", "refused"),
    [
        (None, False),
        ({"other": 1}, False),
        ({"eyesplice": "off", "other": 1}, False),
        ({"eyesplice": "steer"}, True),
        ({"eyesplice": "{}"}, True),
        ({"hotwire": "off"}, True),
    ],
)
def test_beams_are_for_requests_without_functions(xargs, refused):
    request = SimpleNamespace(vllm_xargs=xargs)

    def to_beam_search_params(request, max_tokens):
        return max_tokens

    if refused:
        with pytest.raises(SpecError, match="use_beam_search"):
            beams._parameters(to_beam_search_params, request, 7)
    else:
        assert beams._parameters(to_beam_search_params, request, 7) == 7


def test_no_client_can_name_the_cache_of_a_program(opened, remembered):
    front = opened()
    forged = process(front, params(eyesplice="steer")).cache_salt
    remembered.clear()
    for given in (params(), params(eyesplice="steer"), params(eyesplice="watch")):
        assert process(front, given, "mine").cache_salt.startswith("mine")
        remembered.clear()
        for salt in (forged, "mine" + forged):
            with pytest.raises(SpecError, match="cache_salt"):
                process(front, given, salt)
        assert not remembered


def test_a_request_that_only_reads_shares_blocks_but_takes_none(opened, remembered):
    request = process(opened(), params(eyesplice="watch"))
    assert request.cache_salt is None
    assert request.sampling_params.skip_reading_prefix_cache is True
    assert len(remembered) == 1


def test_vectors_that_a_request_names_itself_are_remembered(opened, remembered):
    front = opened()
    spec = {"writes": [{"vector": "steer/v", "layers": 0}]}
    process(front, params(eyesplice=spec))
    digest = front.deployment.registry.info("steer/v").digest
    assert remembered[0][-1]["vectors"] == {"steer/v": digest}


def test_defaults_are_for_requests_that_name_no_app(opened, remembered):
    front = opened(default="steer")
    assert functions(process(front, params())) == ["steer/0"]
    assert functions(process(front, params(**PLAIN))) == ["steer/0"]
    assert functions(process(front, params(eyesplice="watch"))) == ["watch/0"]
    assert len(remembered) == 3
    for spec in (OFF, {"apps": {}}):
        request = process(front, params(eyesplice=spec))
        assert request.sampling_params.extra_args is None
        assert request.cache_salt is None
    assert len(remembered) == 3


def test_defaults_are_not_for_requests_that_generate_nothing(opened):
    assert not opened(default="steer").concerns(SimpleNamespace(task="embed"))


def test_switches_decide_what_new_requests_can_name(opened, remembered):
    front = opened(default="steer")
    before = front.context()
    front.disable("steer")
    assert not front.is_enabled("steer") and front.is_enabled("watch")
    assert not front.concerns(params())
    with pytest.raises(SpecError, match="steer"):
        front.admit({"eyesplice": "steer"})
    assert front.context() is front.context() is not before
    front.enable("steer")
    assert functions(process(front, params())) == ["steer/0"]


BAD = [
    "missing",
    "{broken",
    {"steer": []},
    {"apps": {"steer": {"scale": float("nan")}}},
    {"writes": [{"vector": "v", "layers": 99}]},
]


@pytest.mark.parametrize("spec", BAD, ids=str)
def test_what_cannot_be_served_is_refused(opened, spec):
    with pytest.raises(SpecError):
        opened().admit({"eyesplice": spec})


@pytest.mark.parametrize("spec", BAD, ids=str)
def test_or_served_without_effect_where_the_operator_says_so(opened, remembered, spec):
    front = opened(on_error="unsteered", default="steer")
    request = process(front, params(eyesplice=spec, **PLAIN))
    assert request.sampling_params.extra_args == PLAIN
    assert request.cache_salt is None
    ((name, program, asked, more),) = remembered
    assert (name, program, asked) == ("r", None, None)
    assert "refused" in more["error"]


def test_an_engine_without_eyesplice_refuses_our_key_only(remembered):
    front = FrontEnd(vllm_config())
    assert not front.switched_on
    assert not front.concerns(params(hotwire="{}"))
    assert front.concerns(params(eyesplice="steer"))
    with pytest.raises(SpecError, match="not switched on"):
        front.admit({"eyesplice": "steer"})
    assert not remembered


def test_a_text_is_lowered_once(opened, remembered, monkeypatch):
    front = opened()
    first = process(front, params(eyesplice="steer", other=1))
    monkeypatch.setattr(frontend, "parse_request", None)
    monkeypatch.setattr(frontend, "lower", None)
    again = process(front, params(eyesplice="steer", other=2))
    sent = [request.sampling_params.extra_args for request in (first, again)]
    assert [args.pop("other") for args in sent] == [1, 2]
    assert sent[0] == sent[1]
    one, two = remembered
    assert one == two
    assert first.cache_salt == again.cache_salt
    with pytest.raises(TypeError):
        process(front, params(eyesplice="watch"))


def test_a_known_text_is_refused_once_its_app_is_disabled(opened, remembered):
    front = opened()
    assert functions(process(front, params(eyesplice="steer")))
    front.disable("steer")
    with pytest.raises(SpecError, match="steer"):
        front.admit({"eyesplice": "steer"})
    front.enable("steer")
    assert functions(process(front, params(eyesplice="steer")))


def test_the_other_key_is_never_forgotten(opened, remembered):
    """A known text beside hotwire's key is another request."""
    front = opened()
    process(front, params(eyesplice="watch"))
    with pytest.raises(SpecError):
        front.admit({"eyesplice": "watch", "hotwire": "no JSON"})


def test_a_text_that_is_lowered_while_its_app_is_disabled_is_not_known_after(
    opened, monkeypatch
):
    """`AsyncLLM` admits in threads: another request meets the new switches first."""
    front, original = opened(), frontend.lower

    def lower(request, context):
        monkeypatch.setattr(frontend, "lower", original)
        front.disable("steer")
        front.admit({"eyesplice": "watch"})
        return original(request, context)

    monkeypatch.setattr(frontend, "lower", lower)
    assert front.admit({"eyesplice": "steer"}).lowered is not None
    with pytest.raises(SpecError, match="steer"):
        front.admit({"eyesplice": "steer"})


def test_what_is_known_stays_small(opened, remembered, monkeypatch):
    monkeypatch.setattr(known_requests, "KNOWN", 2)
    monkeypatch.setattr(known_requests, "LONGEST", 60)
    front = opened()
    for _ in range(2):
        for text in ("steer", "watch", '{"apps": {"steer": {}}}', " " * 60 + "{}"):
            front.admit({"eyesplice": text})
    assert len(front._known) == 2


SAME = {"apps": {"steer": {"scale": 1}}}
OTHERS = [
    {"apps": {"steer": {"scale": 1.0}}},
    {"apps": {"steer": {"scale": True}}},
    {"apps": {"steer": {"scale": -1}}},
    json.dumps(SAME),
]


def test_an_object_is_lowered_once(opened, remembered, monkeypatch):
    front = opened()
    first = front.admit({"eyesplice": SAME})
    lowered = []
    lower = frontend.lower
    monkeypatch.setattr(
        frontend, "lower", lambda *args: lowered.append(args) or lower(*args)
    )
    again = front.admit({"eyesplice": json.loads(json.dumps(SAME))})
    assert not lowered and again == first
    for other in OTHERS:
        with suppress(SpecError):
            front.admit({"eyesplice": other})
    assert len(lowered) == 3  # A boolean is no scale.


def test_equal_values_of_other_types_ask_for_something_else():
    values = [1, 1.0, True, "1", b"1", (1,), [1], {"a": 1}, {"a": True}, None]
    assert len({asked_for((value,)) for value in values}) == len(values)
    assert asked_for((0.0,)) != asked_for((-0.0,))
    text = "".join(["st", "eer"])
    assert asked_for((text, [text, text])) == asked_for(("steer", ["steer", "steer"]))


def test_what_is_not_plain_asks_for_nothing_that_is_known():
    deep = []
    for _ in range(10000):
        deep = [deep]
    circle = {}
    circle["a"] = circle
    for value in (torch.ones(1), object(), deep, circle, "x" * 20000):
        assert asked_for((value,)) is None
