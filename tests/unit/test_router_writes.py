"""Router writes that are well each, and what they leave of a layer's experts together."""

import pytest

from eyesplice import SpecError
from eyesplice.fx_passes.experts_together import check_together
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_request
from tests import request_world

CONTEXT = request_world.context()


def parsed(writes):
    return parse_request({"eyesplice": {"writes": writes}}, CONTEXT)


def router(layers=(3,), **fields):
    """A router write of the fields given; 8 experts, of which a token goes to 2."""
    return {"write": "router", "layers": list(layers), **fields}


@pytest.mark.parametrize(
    ("writes", "thing", "value"),
    [
        (
            [router(deactivate=[0, 1, 2, 3]), router([2, 3], deactivate=[3, 4, 5, 6])],
            "writes[1].deactivate",
            "7 of 8 experts at layer 3 with the writes before it",
        ),
        (
            [router(activate=[1, 2]), router(activate=[2, 5], deactivate=[0])],
            "writes[1].activate",
            "3 experts at layer 3 with the writes before it",
        ),
    ],
)
def test_router_writes_that_leave_too_few_experts_together(writes, thing, value):
    with pytest.raises(SpecError) as refused:
        lower(parsed(writes), CONTEXT)
    assert (refused.value.thing, refused.value.value) == (thing, value)


@pytest.mark.parametrize(
    "writes",
    [
        # The last write that names an expert decides over it: six are left out.
        [router(deactivate=[0, 1, 2, 3, 4, 5]), router(activate=[5], deactivate=[6])],
        # Elsewhere, or not on every token, or not more than before.
        [router(deactivate=[0, 1, 2, 3]), router([2], deactivate=[4, 5, 6])],
        [
            router(deactivate=[0, 1, 2, 3]),
            router(deactivate=[4, 5, 6], when="generated"),
        ],
        [router(deactivate=[0, 1, 2, 3, 4, 5]), router(deactivate=[0, 5])],
    ],
)
def test_router_writes_that_leave_enough_experts_together(writes):
    named = [("writes", write) for write in parsed(writes).functions]
    check_together(named, CONTEXT)
