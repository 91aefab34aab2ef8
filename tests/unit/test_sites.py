"""Names of sites, their aliases, their tables, and layers in every spelling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyesplice import SpecError
from eyesplice.fx_passes.order import place_of
from eyesplice.fx_passes.sites import (
    ALIASES,
    BOUNDARY_SUBMODULES,
    SUBMODULES,
    Site,
    Table,
    parse_layers,
    parse_submodule,
)
from eyesplice.ops.layout import Stage

N = 32


@pytest.mark.parametrize("name", SUBMODULES)
def test_name_and_alias_mean_the_same(name):
    assert parse_submodule(name) == (name, None)
    alias = Site(7, name).alias
    if ALIASES[name] is None:
        assert alias is None
    else:
        assert parse_submodule(alias) == (name, 7)
        assert parse_submodule(alias.replace("7", "*")) == (name, None)
        assert parse_submodule(alias.replace("7", "-1")) == (name, -1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "residual",
        "Residual.post",
        "residual.post ",
        "hook_resid_post",
        "blocks.3.None",
        "blocks.x.hook_resid_post",
        "blocks.٣.hook_resid_post",
        "blocks.1234567.hook_resid_post",
        "blocks.3.hook_resid_post\n",
        None,
        3,
        ["residual.post"],
    ],
)
def test_other_submodules_are_refused(text):
    with pytest.raises(SpecError, match=r"residual\.pre, attention\.pre"):
        parse_submodule(text)


def test_places_are_in_the_order_of_the_forward_pass():
    # As a decoder layer computes: a router stands in its MLP, before what that gives.
    layer = (
        *("residual.pre", "attention.pre", "attention.heads", "attention.post"),
        *("residual.mid", "mlp.pre", "router.logits", "mlp.post", "residual.post"),
    )
    assert layer == SUBMODULES
    sites = [Site(number, name) for number in range(3) for name in layer]
    places = [place_of(site) for site in sites]
    assert places == sorted(set(places))
    launches = [place.launch for place in places]
    kinds = ["pre", "pre", "heads", "mid", "mid", "mid", "router", "pre", "pre"] * 3
    assert launches == sorted(launches)
    assert [place.table.kind for place in places] == kinds


def test_one_stream_value_has_one_place():
    for layer in range(N - 1):
        after, before = Site(layer, "residual.post"), Site(layer + 1, "residual.pre")
        assert after.table == before.table == (Table("pre", layer + 1), Stage.STREAM)


def test_every_site_of_a_layer():
    assert {name: Site(3, name).table for name in SUBMODULES} == {
        "residual.pre": (Table("pre", 3), Stage.STREAM),
        "attention.pre": (Table("pre", 3), Stage.NORMED),
        "attention.heads": (Table("heads", 3), Stage.BRANCH),
        "attention.post": (Table("mid", 3), Stage.BRANCH),
        "residual.mid": (Table("mid", 3), Stage.STREAM),
        "mlp.pre": (Table("mid", 3), Stage.NORMED),
        "mlp.post": (Table("pre", 4), Stage.BRANCH),
        "residual.post": (Table("pre", 4), Stage.STREAM),
        "router.logits": (Table("router", 3), Stage.BRANCH),
    }
    assert set(SUBMODULES) - set(BOUNDARY_SUBMODULES) == {
        "attention.heads",
        "router.logits",
    }
    assert str(Site(3, "mlp.post")) == "mlp.post[3]"


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (5, [5]),
        (-1, [31]),
        ("5", [5]),
        ("-1", [31]),
        ("20-22", [20, 21, 22]),
        (" 3 - 3 ", [3]),
        ("all", range(N)),
        (["all"], range(N)),
        ([3, 1, "2-3", -1], [1, 2, 3, 31]),
        ((0, -32), [0]),
        (range(0, 8, 3), [0, 3, 6]),
        ([range(3), 9], None),
    ],
)
def test_layers(value, layers):
    if layers is None:
        layers = [0, 1, 2, 9]
    assert parse_layers(value, N) == tuple(layers)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1.0, "", "some", "5-3", "1,2", "٣", "1-", {}, b"1"),
        *([], (), range(0), [[1]], [(1,)], [None], [True], [0] * (4 * N + 1)),
        *(32, -33, "32", "0-32", [0, 32], range(10**30), 2**70, "9" * 5000),
    ],
)
def test_other_layers_are_refused(value):
    with pytest.raises(SpecError, match="layer"):
        parse_layers(value, N)


def test_out_of_range_names_the_layer_and_the_model():
    with pytest.raises(SpecError, match=r"layers 32 refused.*0\.\.31.*has 32"):
        parse_layers([3, 32], N)


@settings(deadline=None)
@given(st.lists(st.integers(-N, N - 1), min_size=1, max_size=40))
def test_layers_are_ascending_and_unique(value):
    assert parse_layers(value, N) == tuple(sorted({layer % N for layer in value}))
