"""Engines that are refused before any of them is made."""

from types import SimpleNamespace

import pytest

from eyesplice import SpecError
from eyesplice.integration.activate import activate


def config(speculative, additional):
    return SimpleNamespace(
        additional_config=additional,
        compilation_config=SimpleNamespace(inductor_passes={}),
        speculative_config=speculative,
    )


@pytest.mark.parametrize(
    ("speculative", "shown"),
    [
        (SimpleNamespace(method="ngram", num_speculative_tokens=3), "'ngram'"),
        (SimpleNamespace(method="eagle3"), "'eagle3'"),
        (SimpleNamespace(method=None), "'a draft model'"),
    ],
)
def test_speculative_decoding_is_refused(speculative, shown):
    with pytest.raises(SpecError) as refusal:
        activate(config(speculative, {"eyesplice": {}}))
    message = str(refusal.value)
    assert message.startswith(f"speculative_config {shown} refused. Allowed: none")
    assert "rejected would count in receipts, scores and gates" in message
    assert message.endswith("Do: start the engine without speculative_config.")


def test_speculative_decoding_is_nothing_to_an_engine_without_eyesplice():
    for additional in (None, {}, {"other": 1}):
        found = config(SimpleNamespace(method="ngram"), additional)
        activate(found)
        assert found.additional_config == additional
