"""Remedies that touch lists of the configuration: who copies one loses nothing."""

import re
from dataclasses import replace

import pytest
import yaml

from eyesplice import SpecError
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.sites import Site, parse_layers
from eyesplice.integration.config import parse_config
from eyesplice.ops.layout import Family
from tests import request_world
from tests.request_world import NUM_LAYERS as N

CONTEXT = request_world.context()

HEADS = {"vector": "heads", "submodule": "attention.heads"}


def refusal(function, context=CONTEXT):
    key = "reads" if "read" in function else "writes"
    with pytest.raises(SpecError) as refused:
        lower(parse_request({"eyesplice": {key: [function]}}, context), context)
    return refused.value


def copied(error):
    """The configuration that the remedy states."""
    (text,) = re.findall(r"give `(.*)` in the configuration, a list", str(error))
    return parse_config(yaml.safe_load(text))


@pytest.mark.parametrize("layers", [[2], "all", [0, 2, 3]])
def test_the_remedy_for_a_site_that_was_not_asked_for_keeps_those_that_were(layers):
    there = {site: why for site, why in CONTEXT.armed.items() if why is None}
    error = refusal({**HEADS, "layers": layers}, replace(CONTEXT, armed=there))
    asked = {Site(n, "attention.heads") for n in parse_layers(layers, N)}
    assert copied(error).wanted(N, 8) == set(there) | asked
    assert "a list that replaces the default" in error.remedy
    assert "not armed: it was not requested at start-up" in error.allowed
    assert "residual.pre[0-3], attention.pre[0-3], attention.heads[0]," in error.allowed


def test_the_remedy_keeps_layers_that_are_armed_alone():
    some = {Site(n, "mlp.post"): None for n in (0, 1, 3)}
    error = refusal({**HEADS, "layers": 2}, replace(CONTEXT, armed=some))
    assert '{submodule: mlp.post, layers: ["0-1", 3]}' in error.remedy
    assert copied(error).wanted(N, 8) == {*some, Site(2, "attention.heads")}


@pytest.mark.parametrize(
    ("function", "experts", "reason"),
    [
        ({**HEADS, "layers": [0, 1]}, 8, "the value is inside a fused op"),
        ({"read": "router", "layers": 0}, 0, "this model has no experts"),
    ],
)
def test_nobody_is_told_to_arm_what_the_model_lacks(function, experts, reason):
    """Naming it in `sites` would stop the next start."""
    there = {
        site: why
        for site, why in CONTEXT.armed.items()
        if experts or site.submodule != "router.logits"
    }
    error = refusal(function, replace(CONTEXT, armed=there, num_experts=experts))
    assert f"not armed: {reason}" in error.allowed
    assert error.remedy == "name an armed site"


def test_a_site_that_is_not_armed_is_no_key():
    assert refusal({**HEADS, "layers": 2}).thing == "writes[0]"


@pytest.mark.parametrize(
    ("write", "needed"),
    [
        ({"vector": "calm"}, Family.ADD),
        ({"write": "mask", "vector": "calm"}, Family.MASK),
        ({"vector": "calm", "preserve_norm": True}, Family.PRESERVE_NORM),
    ],
)
def test_the_remedy_for_an_op_that_is_not_compiled_in_keeps_those_that_are(
    write, needed
):
    there = (Family.ADD | Family.RANK1 | Family.READ) & ~needed
    error = refusal({"layers": 0, **write}, replace(CONTEXT, families=there))
    assert copied(error).families() == there | needed
    assert "a list that replaces the default" in error.remedy
    *_, compiled = error.allowed.partition("compiled into this engine: ")
    assert parse_config({"ops": compiled.split(", ")}).families() == there
    assert "add add" not in str(error)


def test_an_engine_without_ops_says_so():
    error = refusal(
        {"vector": "calm", "layers": 0}, replace(CONTEXT, families=Family(0))
    )
    assert error.allowed.endswith("into this engine: none")
    assert copied(error).families() == Family.ADD
