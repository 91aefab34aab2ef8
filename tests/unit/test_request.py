"""From a client's words to normalised writes, and every way to get them wrong."""

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyesplice import SpecError
from eyesplice.fx_passes.kernels import WRITE_KERNELS
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import (
    Request,
    Write,
    parse_canonical,
    parse_request,
)
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES
from tests import request_world
from tests.request_world import NUM_LAYERS

CONTEXT = request_world.context()


def parse(value):
    return parse_request({"eyesplice": value}, CONTEXT)


def parse_one(**write):
    (result,) = parse({"writes": [{"vector": "pirate", "layers": 0, **write}]}).writes
    return result


def hotwire(value):
    return parse_request({"hotwire": value}, CONTEXT)


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"other": 1},
        {"eyesplice": "off"},
        {"eyesplice": None},
        {"hotwire": None},
    ],
)
def test_nothing_asked(extra_args):
    assert parse_request(extra_args, CONTEXT) is None


def test_defaults():
    assert parse_one() == Write("steering_vector", "pirate", (0,), "residual.post")
    assert parse({}) == parse({"writes": []}) == Request(())


def test_everything_is_normalised():
    write = {
        "write": "clamp",
        "vector": "calm",
        "layers": "1-2",
        "submodule": "blocks.*.hook_mlp_out",
        "scale": 2,
        "when": " prompt\n and  all ",
        "lo": -1,
        "hi": 0.5,
        "name": "soft",
    }
    expected = Write(
        *("clamp", "calm", (1, 2), "mlp.post", 2.0, "prompt and all"),
        lo=-1.0,
        hi=0.5,
        name="soft",
    )
    for value in ({"writes": [write]}, json.dumps({"writes": [write]}, indent=1)):
        assert parse(value) == Request((expected,))
        assert parse_canonical(parse(value).canonical(), CONTEXT) == parse(value)


def test_an_alias_may_carry_the_layer():
    value = {"vector": "calm", "submodule": "blocks.-1.hook_resid_mid"}
    (write,) = parse({"writes": [value]}).writes
    assert (write.submodule, write.layers) == ("residual.mid", (NUM_LAYERS - 1,))
    assert parse({"writes": [{**value, "layers": [3]}]}).writes == (write,)


def test_kernel_fields_have_defaults():
    assert parse_one(write="one_sided").offset == 0.0
    assert parse_one(write="ablate").offset is None
    assert parse_one(write="clamp", hi=3).lo is None
    assert str(parse_one(scale=-0.0).scale) == "0.0"


def test_python_sequences_are_lists():
    assert parse_one(layers=(0, 2)).layers == (0, 2)
    assert parse_one(layers=range(3)).layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        ({"vector": "pirat"}, r"writes\[0\]\.vector 'pirat' .*pirate, .*did you mean"),
        (
            {"vector": "xyz"},
            r"a registered vector: biases, calm, .*folder of vectors .*or name another",
        ),
        ({"vector": ""}, r"writes\[0\]\.vector '' .*1 to 256 printable"),
        ({"vector": 3}, r"writes\[0\]\.vector 3 "),
        ({"vector": "a\nb"}, r"vector 'a\\nb' .*printable"),
        ({"vector": "short"}, r"shape \[3, 24\].*4 rows"),
        (
            {"vector": "heads"},
            r"shape \[16\].*24 elements, the width of residual\.post",
        ),
        ({"layers": None}, r"writes\[0\]\.layers None .*name the decoder layers"),
        ({"layers": 4}, r"writes\[0\]\.layers 4 refused.*0\.\.3"),
        ({"layers": []}, r"writes\[0\]\.layers \[\]"),
        ({"layers": [[0]]}, r"writes\[0\]\.layers"),
        ({"layers": 1.0}, r"writes\[0\]\.layers 1\.0"),
        ({"layers": [0, 4]}, r"writes\[0\]\.layers 4 refused.*0\.\.3"),
        (
            {"submodule": "blocks.9.hook_resid_post"},
            r"writes\[0\]\.submodule 'blocks\.9\.hook_resid_post' .*blocks\.0 to blocks\.3",
        ),
        ({"submodule": "resid"}, r"writes\[0\]\.submodule 'resid'"),
        (
            {"submodule": "blocks.1.hook_mlp_out"},
            r"writes\[0\]\.layers 0 .*1, the layer",
        ),
        ({"scale": "2"}, r"writes\[0\]\.scale '2' refused\. Allowed: a number"),
        ({"scale": True}, r"writes\[0\]\.scale True refused\. Allowed: a number"),
        ({"scale": None}, r"writes\[0\]\.scale None"),
        ({"scale": 1e39}, r"writes\[0\]\.scale 1e\+39 .*3\.4e\+38"),
        ({"scale": float("nan")}, r"writes\[0\]\.scale 'nan' .*finite"),
        ({"scale": float("-inf")}, r"writes\[0\]\.scale '-inf' .*finite"),
        ({"scale": 10**5000}, r"writes\[0\]\.scale 'an integer of 16610 bits'"),
        ({"when": 1}, r"writes\[0\]\.when 1 "),
        ({"when": "promt"}, r"writes\[0\]\.when 'promt' .*did you mean prompt"),
        ({"when": "token_in(x)"}, r"writes\[0\]\.when .*unknown token set"),
        ({"name": "\ud800"}, "printable"),
        ({"lo": 0}, r"writes\[0\]\.lo 0\.0 .*only with the kernel clamp"),
        (
            {"write": "ablate", "offset": 0},
            r"\.offset 0\.0 .*kernel one_sided, not with",
        ),
        ({"write": "one_sided", "hi": 1}, r"writes\[0\]\.hi 1\.0"),
        ({"write": "clamp"}, r"writes\[0\]\.lo None .*lo, hi or both"),
        (
            {"write": "clamp", "lo": 2, "hi": 1},
            r"writes\[0\]\.lo 2\.0 .*at most hi, 1\.0",
        ),
        ({"write": "ablat"}, r"writes\[0\]\.write 'ablat' .*write ablate \(did you"),
        (
            {"write": "affine"},
            r"writes\[0\]\.vector 'pirate' .*kernels steering_vector",
        ),
        ({"write": "my::op"}, r"'my::op' .*deployed apps: none.*put it into an app"),
        (
            {"gate": "truth >= 0"},
            r"(?s)writes\[0\]\.gate .*\^ unknown read: nothing is",
        ),
        ({"gate": 3}, r"writes\[0\]\.gate 3 .*a condition on scores"),
        ({"preserve_norm": 1}, r"writes\[0\]\.preserve_norm 1 .*true or false"),
        ({"reduce": "mean"}, r"unknown key writes\[0\]\.reduce"),
        ({"function": "relu"}, r"\.function 'relu' .*kernel affine, not with steering"),
        ({"threshold": 1}, r"\.threshold 1\.0 .*kernel feature_clamp, not with"),
        ({"activate": [1]}, r"\.activate \[1\] .*kernel router, not with"),
        ({"u": "up"}, r"\.u 'up' .*kernel affine, not with"),
        ({"scalee": 1}, r"writes\[0\]\.scalee .*keys write, name.*write scale"),
        ({3: 1}, r"a key of type int"),
        ({"x" * 9999: 1}, r"unknown key writes\[0\]\.x{80} "),
    ],
)
def test_a_bad_write_is_refused(write, message):
    with pytest.raises(SpecError, match=r"(?s)" + message):
        parse({"writes": [{"vector": "pirate", "layers": 0, **write}]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "guardd",
            r"eyesplice 'guardd' .*an app \(asleep, guarded\), \"off\".*guarded \(did",
        ),
        ("", r"eyesplice '' .*an app \(asleep, guarded\).*name a deployed app"),
        ("OFF", r"eyesplice 'OFF' .*an app \(asleep, guarded\)"),
        ("asleep", r"app 'asleep' .*this one is disabled.*apps/asleep/enable"),
        ([], r"eyesplice \[\] .*an object with the keys apps, writes, reads"),
        (5, "eyesplice 5 refused"),
        (True, "eyesplice True refused"),
        (b"{}", "a value of type bytes"),
        (torch.zeros(2), "a value of type Tensor"),
        ({"apps": {"other": {}}}, r"eyesplice 'other' .*an app \(asleep, guarded\)"),
        ({"apps": {"guarded": 3}}, r"apps \{'guarded': 3\} .*objects of overrides"),
        ({"apps": ["guarded"]}, r"apps \['guarded'\] .*an object from names of apps"),
        ({"reads": {}}, r"reads \{\} .*a list of at most 256 read objects"),
        ({"stream_scores": 1}, r"stream_scores 1 .*true or false"),
        ({"functions": []}, r"unknown key functions"),
        ({"write": []}, r"unknown key write .*keys apps, writes.*write writes"),
        ({"writes": None}, r"writes None .*a list of at most 256"),
        ({"writes": {}}, r"writes \{\} .*a list of at most 256"),
        ({"writes": [None]}, r"writes\[0\] None .*an object with the keys"),
        ({"writes": [{}] * 257}, "at most 256 write objects"),
        ({"writes": [{}]}, r"writes\[0\] \{\} .*add vector"),
        ("{", r"a JSON object \(Expecting"),
        ("{} {}", r"a JSON object \(Extra data"),
        ('{"writes": [], "writes": []}', "the key 'writes' is given twice"),
        ('{"writes": [{"scale": NaN}]}', "NaN is not a JSON number"),
        ('{"writes": [{"scale": -Infinity}]}', "-Infinity is not a JSON number"),
        ('{"writes": [{"scale": 1e999}]}', r"writes\[0\]\.scale 'inf' .*finite"),
        ('{"writes": ' + "9" * 5000 + "}", "a JSON object"),
        ('{"writes": ' + "[" * 200_000, "a JSON object"),
        ('{"writes": ' + "[" * 40 + "]" * 40 + "}", "nesting deeper than 32"),
        ("{" + " " * 2**20 + "}", "1048578 bytes of JSON.*at most 1048576"),
        ('{"a": "\ud800"}', "unknown key a"),
    ],
)
def test_a_bad_object_is_refused(value, message):
    with pytest.raises(SpecError, match=r"(?s)" + message):
        parse(value)


def test_many_keys_and_one_twice_are_refused_at_once():
    keys = "".join(f'"{i}":0,' for i in range(80_000))
    with pytest.raises(SpecError, match="the key '7' is given twice"):
        parse("{" + keys + '"7":0}')


def test_shared_and_cyclic_values_are_refused():
    wide = [0]
    for _ in range(30):
        wide = [wide, wide]
    with pytest.raises(SpecError, match="more than 100000 values"):
        parse({"writes": wide})
    cyclic = {}
    cyclic["writes"] = cyclic
    with pytest.raises(SpecError, match="nesting deeper than 32"):
        parse(cyclic)


class TestHotwire:
    def test_one_entry(self):
        entry = {"id": "pirate", "layer": 2, "scale": 1.5}
        expected = Request(
            (Write("steering_vector", "pirate", (2,), "residual.post", 1.5),)
        )
        for value in (entry, [entry], json.dumps(entry), json.dumps([entry])):
            assert hotwire(value) == expected
            assert parse({"hotwire": value}) == expected

    def test_what_its_clients_may_send(self):
        entry = {"id": "calm", "layer": "-1", "scale": "2.5", "decode_only": True}
        expected = Write(
            *("steering_vector", "calm", (3,), "residual.post", 2.5, "generated")
        )
        assert hotwire(entry).writes == (expected,)
        (write,) = hotwire({"id": "calm", "layer": 1.0, "decode_only": None}).writes
        assert (write.layers, write.scale, write.when) == ((1,), 1.0, "all")

    @pytest.mark.parametrize(
        ("flags", "conditions"),
        [
            ((False, False), ["all"]),
            ((True, False), ["all"]),
            ((False, True), ["prompt", "generated"]),
            ((True, True), ["generated"]),
            ((False, True, True), ["prompt", "generated"]),
        ],
    )
    def test_the_last_entry_of_a_layer_wins(self, flags, conditions):
        entries = [
            {"id": "pirate", "layer": 1, "scale": i, "decode_only": flag}
            for i, flag in enumerate(flags)
        ]
        writes = hotwire([*entries, {"id": "calm", "layer": 2}]).writes
        assert [w.when for w in writes] == [*conditions, "all"]
        assert writes[-2].scale == len(flags) - 1

    def test_beside_our_own_writes(self):
        own = {"writes": [{"vector": "calm", "layers": 0}]}
        other = {"id": "pirate", "layer": 1}
        both = parse_request({"eyesplice": own, "hotwire": other}, CONTEXT)
        assert both.writes == parse(own).writes + hotwire(other).writes
        assert both == parse({**own, "hotwire": other})
        with pytest.raises(SpecError, match=r"'off' refused.*beside the key hotwire"):
            parse_request({"eyesplice": "off", "hotwire": other}, CONTEXT)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"id": "pirate"}, r"hotwire\[0\] .*add layer"),
            ({"layer": 1}, r"hotwire\[0\] .*add id"),
            ({"id": "nobody", "layer": 1}, r"hotwire\[0\]\.id 'nobody'"),
            ({"id": "short", "layer": 1}, r"hotwire\[0\]\.id 'short of shape"),
            ({"id": "pirate", "layer": 4}, r"hotwire\[0\]\.layer 4"),
            ({"id": "pirate", "layer": 1.5}, r"hotwire\[0\]\.layer 1\.5"),
            ({"id": "pirate", "layer": "all"}, r"hotwire\[0\]\.layer 'all'"),
            ({"id": "pirate", "layer": True}, r"hotwire\[0\]\.layer True"),
            ({"id": "pirate", "layer": 1, "scale": "nan"}, r"hotwire\[0\]\.scale"),
            ({"id": "pirate", "layer": 1, "scale": None}, r"hotwire\[0\]\.scale None"),
            ({"id": "pirate", "layer": 1, "decode_only": "no"}, "true or false"),
            (
                {"id": "pirate", "layer": 1, "when": "all"},
                r"unknown key hotwire\[0\]\.when",
            ),
            ([3], r"hotwire\[0\] 3 .*an object"),
            ("pirate", r"hotwire 'pirate' .*a JSON object"),
            (7, r"hotwire\[0\] 7"),
            ([{}] * 257, "257 entries"),
        ],
    )
    def test_misfits_are_refused(self, value, message):
        with pytest.raises(SpecError, match=message):
            hotwire(value)


def test_at_most_256_writes_in_all():
    write, entry = {"vector": "calm", "layers": 0}, {"id": "calm", "layer": 0}
    assert len(parse({"writes": [write] * 256}).writes) == 256
    with pytest.raises(SpecError, match=r"257 writes.*at most 256"):
        parse({"writes": [write] * 256, "hotwire": entry})


def test_digest_covers_the_request_and_the_vectors():
    request = parse({"writes": [{"vector": "calm", "layers": [1, 0]}]})
    table = request_world.vectors()
    digest = request.digest(table)
    assert digest.startswith("sha256:")
    assert len(digest) == 71
    assert parse({"writes": [], "reads": [], "stream_scores": True}).digest(
        table
    ) == parse({}).digest(table)
    same = parse('{"writes": [{"layers": "0-1", "vector": "calm", "scale": 1}]}')
    assert same.digest(table) == digest
    other = parse({"writes": [{"vector": "calm", "layers": [1, 0], "scale": 1.1}]})
    assert other.digest(table) != digest

    class Changed(request_world.Vectors):
        def info(self, name):
            return super().info(name[::-1])

    changed = Changed({name[::-1]: t for name, t in table.tensors.items()})
    assert request.digest(changed) != digest
    with pytest.raises(SpecError, match="'calm' refused"):
        request.digest(request_world.Vectors({}))


def test_names_of_reads_and_gated_functions_are_unique():
    read = {"read": "norm", "name": "x", "layers": 0}
    write = {"vector": "calm", "layers": 2, "name": "x"}
    assert len(parse({"writes": [write, write]}).writes) == 2
    for value in (
        {"reads": [read, read]},
        {"reads": [read], "writes": [write]},
        {
            "reads": [{**read, "name": "y"}],
            "writes": [write, {**write, "gate": "y > 0"}],
        },
    ):
        with pytest.raises(SpecError, match=r"\[[01]\]\.name 'x' .*one name for each"):
            parse(value)


numbers = st.floats(-3e38, 3e38)
own_fields = {
    "replace": st.just({}),
    "mask": st.fixed_dictionaries({}, optional={"preserve_norm": st.booleans()}),
    "affine": st.fixed_dictionaries(
        {"u": st.sampled_from(["up", "ups"]), "v": st.sampled_from(["down", "downs"])},
        optional={
            "bias": st.sampled_from(["biases", "layer_biases"]),
            "function": st.sampled_from(["identity", "relu", "sigmoid", "step"]),
        },
    ),
    "feature_clamp": st.fixed_dictionaries(
        {"weight": st.sampled_from(["pirate", "calm"])},
        optional={"bias": numbers, "threshold": numbers, "value": numbers},
    ),
    "router": st.sampled_from(
        [
            {"activate": [4, 1], "deactivate": [6]},
            {"activate": {"2": [1, 4]}, "deactivate": {"0-3": [6]}, "layers": None},
            {"activate": [1], "epsilon": 0.5},
        ]
    ),
    "steering_vector": st.just({}),
    "ablate": st.just({}),
    "one_sided": st.fixed_dictionaries({}, optional={"offset": numbers}),
    "clamp": st.lists(numbers, min_size=2, max_size=2).flatmap(
        lambda pair: st.sampled_from(
            [
                {"lo": min(pair), "hi": max(pair)},
                {"lo": pair[0]},
                {"hi": pair[0], "lo": None},
            ]
        )
    ),
}
layers = st.one_of(
    st.integers(-NUM_LAYERS, NUM_LAYERS - 1),
    st.lists(st.integers(-NUM_LAYERS, NUM_LAYERS - 1), min_size=1, max_size=9),
    st.sampled_from(["all", "1-2", "3", ["0-1", -1]]),
)


def fitting(write):
    """The write without the common fields that its kernel has not."""
    foreign = {"affine": ("vector",), "router": ("vector", "scale", "submodule")}
    for field in foreign.get(write["write"], ()):
        write.pop(field, None)
    return write


writes = st.sampled_from(WRITE_KERNELS).flatmap(
    lambda kernel: st.builds(
        lambda common, own: fitting({"write": kernel, **common, **own}),
        st.fixed_dictionaries(
            {"vector": st.sampled_from(["pirate", "calm"]), "layers": layers},
            optional={
                "submodule": st.sampled_from(BOUNDARY_SUBMODULES),
                "scale": numbers | st.integers(-9, 9),
                "when": st.sampled_from(
                    [
                        *("all", " prompt  and all", "positions( 1:-2 )"),
                        *("token_in(newlines)", "after(token_in([1, 2]))"),
                    ]
                ),
                "name": st.text(
                    st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9
                ),
            },
        ),
        own_fields[kernel],
    )
)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"writes": st.lists(writes, max_size=6)},
        optional={
            "apps": st.just({"guarded": {}}),
            "reads": st.just([{"read": "norm", "layers": "0-2", "over": "prompt"}]),
            "stream_scores": st.booleans(),
        },
    )
)
def test_canonical_text_is_a_fixed_point(value):
    request = parse(value)
    assert parse(json.dumps(value)) == request
    text = request.canonical()
    again = parse_canonical(text, CONTEXT)
    assert again == request
    assert again.canonical() == text
    sets = CONTEXT.token_sets
    digest = request.digest(CONTEXT.vectors, sets)
    assert again.digest(CONTEXT.vectors, sets) == digest


words = st.sampled_from(
    [
        "writes",
        "reads",
        "hotwire",
        "apps",
        "guarded",
        "gate",
        "weight",
        "bias",
        "activate",
        "write",
        "vector",
        "layers",
        "submodule",
        "scale",
        "when",
        "lo",
        "hi",
        "offset",
        "name",
        "id",
        "layer",
        "decode_only",
        "pirate",
        "calm",
        "residual.post",
        "all",
        "clamp",
        "ablate",
        "0-2",
        "off",
    ]
)
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | words
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
mutated = st.tuples(writes, words, junk).map(
    lambda parts: {"writes": [{**parts[0], parts[1]: parts[2]}]}
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["eyesplice", "hotwire"]), junk | mutated | junk.map(json.dumps))
def test_junk_is_served_or_refused(key, value):
    try:
        request = parse_request({key: value}, CONTEXT)
        if request is not None:
            lower(request, CONTEXT)
            assert parse_canonical(request.canonical(), CONTEXT) == request
    except SpecError as error:
        assert str(error)


@settings(deadline=None)
@given(st.text(max_size=80) | st.text('{}[]":,.eE+-0123456789 nul', max_size=80))
def test_any_text_is_served_or_refused(text):
    for args in ({"eyesplice": text}, {"eyesplice": "{" + text}, {"hotwire": text}):
        with suppress(SpecError):
            parse_request(args, CONTEXT)
