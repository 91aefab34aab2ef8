"""The requests of hotwire-vllm's clients mean what they mean to hotwire-vllm."""

import pytest

from tests import oracle as judge
from tests.engine import Ask, Engine, assert_judged, distance, prompt

pytestmark = pytest.mark.engine

PROMPT = prompt(8, 30)
ONE = {"id": "v0", "layer": 1, "scale": 2.0}
LATER = {"id": "v1", "layer": 3, "scale": -1.5, "decode_only": True}


def test_layers_are_steered_at_every_token_or_once_decoding(
    llama: Engine, vectors, llama_oracle: judge.Oracle
):
    bodies = (ONE, LATER, [ONE, LATER])
    plain, one, later, both = llama.ask(
        Ask(PROMPT), *(Ask(PROMPT, extra={"hotwire": body}) for body in bodies)
    )
    add_one = judge.Intervention("residual.post", 1, judge.add(vectors["v0"], 2.0))
    edit = judge.where(judge.add(vectors["v1"], -1.5), judge.generated)
    add_later = judge.Intervention("residual.post", 3, edit)
    assert_judged(llama_oracle, one, add_one)
    assert_judged(llama_oracle, later, add_later)
    assert_judged(llama_oracle, both, add_one, add_later)
    assert distance(one, plain) > 1e-2 and distance(both, one) > 1e-2
