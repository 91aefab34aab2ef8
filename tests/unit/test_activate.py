"""Engines that are refused before any of them is made."""

from types import SimpleNamespace

import pytest

from eyesplice import SpecError
from eyesplice.integration.activate import activate


def config(speculative, additional, max_num_seqs=8):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        additional_config=additional,
        compilation_config=SimpleNamespace(inductor_passes={}, mode=None),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        lora_config=None,
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


@pytest.mark.parametrize("max_num_seqs", [8192, 100_000])
def test_more_requests_than_a_map_can_name_rows_for_are_refused(max_num_seqs):
    with pytest.raises(SpecError) as refusal:
        activate(config(None, {"eyesplice": {}}, max_num_seqs))
    message = str(refusal.value)
    assert message.startswith(f"max_num_seqs {max_num_seqs} refused. Allowed: 8191 at")
    assert message.endswith("Do: start the engine with max_num_seqs 8191 or less.")


def test_as_many_requests_as_a_map_can_name_rows_for_pass():
    with pytest.raises(SpecError, match=r"^pipeline_parallel_size 2 refused"):
        activate(config(None, {"eyesplice": {}}, 8191))


def test_any_number_of_requests_is_nothing_to_an_engine_without_eyesplice():
    activate(config(None, None, 8192))
