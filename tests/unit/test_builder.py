"""Declaring functions and apps: what a builder makes, and what it refuses."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eyesplice as m

V = torch.arange(1.0, 9.0)


def steer(**fields):
    return m.write("steering_vector", **fields).layers([22])


def app(*functions, **parts):
    return m.App("guarded", list(functions), **parts)


def guarded():
    return m.App(
        "guarded",
        [
            m.read("probe", name="gate18", weight="w18")
            .layers([18])
            .submodule("residual.post"),
            m.write("steering_vector", name="steer", vector="v", scale=1.5)
            .layers([22])
            .submodule("attention.post")
            .cond(when="token_in(trigger_list)", gate="gate18 >= 0"),
        ],
        tensors={"w18": V, "v": V.half()},
        token_sets={"trigger_list": [271, 198]},
    )


def test_a_builder_states_its_yaml_entry():
    truth = (
        m.read("probe", name="truth", weight="w", bias=-0.3)
        .layers([23])
        .submodule("residual.post")
        .cond("last_token")
    )
    assert dict(truth.fields) == {
        "read": "probe",
        "name": "truth",
        "weight": "w",
        "bias": -0.3,
        "layers": [23],
        "submodule": "residual.post",
        "when": "last_token",
    }


def test_the_builders_of_the_app_and_its_entries_are_the_same():
    entries = [
        {
            "read": "probe",
            "name": "gate18",
            "weight": "w18",
            "layers": [18],
            "submodule": "residual.post",
        },
        {
            "write": "steering_vector",
            "name": "steer",
            "vector": "v",
            "scale": 1.5,
            "layers": [22],
            "submodule": "attention.post",
            "when": "token_in(trigger_list)",
            "gate": "gate18 >= 0",
        },
    ]
    same = m.App(
        "guarded",
        entries,
        tensors={"w18": V, "v": V.half()},
        token_sets={"trigger_list": [198, 271]},
    )
    assert guarded() == same
    assert hash(guarded()) == hash(same)
    assert [dict(entry) for entry in same.functions] == entries
    assert same.token_sets == {"trigger_list": [198, 271]}


def test_each_method_returns_another_builder():
    first = m.write("ablate", vector="v")
    second = first.layers("all")
    third = second.cond("prompt").cond(gate="x > 1")
    assert "layers" not in first.fields
    assert "when" not in second.fields
    assert third.fields["when"] == "prompt"
    assert third.fields["gate"] == "x > 1"
    with pytest.raises(TypeError):
        first.fields["layers"] = [1]
    with pytest.raises(AttributeError):
        first.fields = {}


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (([1, 2],), [1, 2]),
        ((range(20, 23),), [20, 21, 22]),
        ((20, 21), [20, 21]),
        ((-1,), -1),
        (("all",), "all"),
        (("20-49",), "20-49"),
        (((3, "5-6"),), [3, "5-6"]),
    ],
)
def test_layers_as_they_may_be_given(given, stored):
    assert m.write("ablate").layers(*given).fields["layers"] == stored


def test_a_tensor_that_is_not_named_has_the_parameters_name():
    entry = m.write("ablate").layers("all")
    (found,) = app(entry, tensors={"vector": V}).functions
    assert found["vector"] == "vector"
    with pytest.raises(m.SpecError, match=r"functions\[0\]\.vector 'vector' refused"):
        app(entry, tensors={"v": V})


def test_a_tensor_may_stand_for_its_name():
    made = app(
        m.read("norm").layers(0),
        steer(vector=V),
        {"write": "ablate", "vector": -V, "layers": 1},
    )
    assert [entry.get("vector") for entry in made.functions] == [
        None,
        "write1.vector",
        "write2.vector",
    ]
    assert torch.equal(made.tensors["write2.vector"], -V)


def test_an_app_owns_its_tensors_and_entries():
    mine = V.clone()
    made = app(steer(vector=mine))
    digest = made.digest
    mine.zero_()
    made.functions[0]["scale"] = 9.0
    with pytest.raises(TypeError):
        made.tensors["x"] = mine
    assert torch.equal(made.tensors["write0.vector"], V)
    assert "scale" not in made.functions[0]
    assert made.digest == digest == app(steer(vector=V)).digest


@pytest.mark.parametrize(
    "other",
    [
        lambda: m.App("other", [steer(vector=V)]),
        lambda: app(steer(vector=V, scale=2.0)),
        lambda: app(steer(vector=V * 2)),
        lambda: app(steer(vector=V.double())),
        lambda: app(steer(vector=V), token_sets={"t": [1]}),
        lambda: app(steer(vector=V), tensors={"unused": V}),
    ],
)
def test_each_part_counts_in_equality(other):
    assert app(steer(vector=V)) != other()
    assert app(steer(vector=V)).digest != other().digest


def test_a_dict_form_goes_there_and_back():
    assert m.App.from_dict(guarded().to_dict()) == guarded()
    assert m.App.from_dict(guarded().to_dict()).to_dict() == guarded().to_dict()


BUILDERS = {
    "kernel": (lambda: m.write("steering_vectr"), "did you mean"),
    "read kernel": (lambda: m.read("ablate"), "refused"),
    "not a name": (lambda: m.write(3), "refused"),
    "field": (lambda: m.write("ablate", vectr="v"), "vectr"),
    "kind twice": (lambda: m.write("ablate", read="probe"), "refused"),
    "scale": (lambda: m.write("ablate", scale="big"), "scale"),
    "infinite": (lambda: m.write("ablate", scale=float("inf")), "inf"),
    "name": (lambda: m.read("norm", name=3), "name"),
    "tensor in scale": (lambda: m.write("ablate", scale=torch.ones(1)), "scale"),
    "object": (lambda: m.write("ablate", vector=object()), "object"),
    "layers": (lambda: m.write("ablate").layers("first"), "layers"),
    "layer": (lambda: m.write("ablate").layers(1.5), "layers"),
    "no layers": (lambda: m.write("ablate").layers(), "layers"),
    "many layers": (lambda: m.write("ablate").layers(["0-999"] * 1001), "layers"),
    "submodule": (lambda: m.write("ablate").submodule("residual"), "submodule"),
    "when": (lambda: m.write("ablate").cond("sometimes"), "when"),
    "gate": (lambda: m.write("ablate").cond(gate="x >>= 1"), "gate"),
    "foreign field": (lambda: m.write("ablate", lo=1.0), "lo"),
    "read field": (lambda: m.write("ablate", reduce="mean"), "reduce"),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_refuses_at_once(name):
    make, said = BUILDERS[name]
    with pytest.raises(m.SpecError, match=said):
        make()


LAYERED = torch.ones(3, 8)
APPS = {
    "name off": (lambda: m.App("off", [steer(vector=V)]), "name of app 'off'"),
    "name": (lambda: m.App("a/b", [steer(vector=V)]), "name of app 'a/b'"),
    "path": (lambda: m.App("..", [steer(vector=V)]), "name of app"),
    "long": (lambda: m.App("a" * 65, [steer(vector=V)]), "name of app"),
    "line": (lambda: m.App("a\n", [steer(vector=V)]), "name of app"),
    "number": (lambda: m.App(3, [steer(vector=V)]), "name of app"),
    "none": (lambda: app(), "functions"),
    "many": (lambda: app(*[steer(vector="v")] * 257, tensors={"v": V}), "functions"),
    "text": (lambda: m.App("a", "functions"), "functions"),
    "function": (lambda: app(3), r"functions\[0\]"),
    "both": (lambda: app({"read": "norm", "write": "ablate"}), r"functions\[0\]"),
    "layers": (lambda: app(m.write("ablate", vector=V)), r"functions\[0\].layers"),
    "twice": (
        lambda: app(*[m.read("norm", name="n").layers(0)] * 2),
        r"functions\[1\].name 'n'",
    ),
    "digits": (lambda: app(m.read("norm", name="1").layers(0)), r"\.name '1'"),
    "function name": (lambda: app(m.read("norm", name="a b").layers(0)), "'a b'"),
    "missing": (lambda: app(steer(vector="w"), tensors={"w2": V}), "did you mean"),
    "axes": (lambda: app(steer(vector=torch.ones(2, 2, 8))), "shape"),
    "integers": (lambda: app(steer(vector=V.long())), "int64"),
    "nan": (lambda: app(steer(vector=V / 0 * 0)), "NaN or Inf"),
    "empty": (lambda: app(steer(vector=torch.ones(0))), "not empty"),
    "scalar": (lambda: app(steer(vector=torch.tensor(1.0))), "float32"),
    "sparse": (lambda: app(steer(vector=V.to_sparse())), "dense"),
    "meta": (lambda: app(steer(vector=V.to("meta"))), "values"),
    "list": (lambda: app(steer(vector="v"), tensors={"v": [1.0]}), "tensor v"),
    "tensors": (lambda: app(steer(vector=V), tensors=[V]), "tensors"),
    "tensor name": (lambda: app(steer(vector=V), tensors={"a b": V}), "'a b'"),
    "metadata": (lambda: app(steer(vector=V), tensors={"__metadata__": V}), "name"),
    "name taken": (
        lambda: app(steer(vector=V), tensors={"write0.vector": V}),
        "write0.vector",
    ),
    "ranks": (
        lambda: app(m.write("affine", u=torch.ones(2, 8), v=LAYERED).layers(0)),
        r"functions\[0\].v",
    ),
    "bias": (
        lambda: app(m.write("affine", u=LAYERED, v=LAYERED, bias=V).layers(0)),
        r"functions\[0\].bias",
    ),
    "widths": (
        lambda: app(m.write("feature_clamp", vector=V, weight=V[1:]).layers(0)),
        r"functions\[0\].weight",
    ),
    "token ids": (lambda: app(steer(vector=V), token_sets={"t": [-1]}), "t.0"),
    "token set": (lambda: app(steer(vector=V), token_sets={"t": {"ends": "x"}}), "t"),
    "token text": (
        lambda: app(steer(vector=V), token_sets={"t": {"decoded_endswith": ""}}),
        "token_sets.t.decoded_endswith",
    ),
    "no tokens": (lambda: app(steer(vector=V), token_sets={"t": []}), "token_sets.t"),
    "true": (lambda: app(steer(vector=V), token_sets={"t": [True]}), "token_sets.t"),
    "unknown set": (
        lambda: app(steer(vector=V).cond("token_in(t)")),
        "unknown token set",
    ),
    "unknown read": (lambda: app(steer(vector=V).cond(gate="x > 0")), "unknown read"),
}


@pytest.mark.parametrize("name", APPS)
def test_an_app_refuses_by_name(name):
    make, said = APPS[name]
    with pytest.raises(m.SpecError, match=said.replace("t.0", r"t\[0\]")):
        make()


def test_shapes_that_fit():
    made = app(
        m.write("affine", u=torch.ones(2, 8), v=torch.ones(2, 8), bias=V[:2]).layers(0),
        m.write("affine", u=torch.ones(3, 2, 8), v=torch.ones(2, 8)).layers(0),
        m.write("mask", vector=LAYERED).layers(0),
        m.write("feature_clamp", vector=V, weight=V, value=3.0).layers(0),
        m.read("sae", weight=torch.ones(5, 8), bias=torch.ones(5)).layers(0),
        m.read("sae", weight=torch.ones(5, 8), bias=0.5).layers(0),
        m.read("router").layers(0),
        m.write("router", activate=[1], deactivate=[2, 3]).layers("all"),
        m.write("mylib::mine", scale=2.0).submodule("blocks.3.hook_resid_post"),
    )
    assert len(made.functions) == 9


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "functions", "write", "read", "layers", "vector", "v"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_an_app_or_refused(value):
    with contextlib.suppress(m.SpecError):
        assert isinstance(m.App.from_dict(value), m.App)


@given(st.lists(JSON, max_size=3), JSON, JSON)
def test_any_parts_are_an_app_or_refused(functions, tensors, token_sets):
    with contextlib.suppress(m.SpecError):
        m.App("a", [*functions], tensors, token_sets)
