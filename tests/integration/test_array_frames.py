"""Captured rows through vLLM's own encoder and decoder, as between two processes."""

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from eyesplice.integration import output_hook
from eyesplice.integration.captured import Captured
from eyesplice.integration.raw_answers import RawAnswer


def rows(count: int, width: int, seed: int) -> Captured:
    rng = np.random.default_rng(seed)
    return Captured(
        np.zeros(count, np.int32),
        np.arange(count, dtype=np.int32),
        rng.integers(0, 256, (count, width), dtype=np.uint8),
    )


def output(request_id: str, params) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=[1], kv_transfer_params=params
    )


@pytest.mark.parametrize(
    "sizes", [[(2, 8)], [(2, 8192)], [(300, 16), (1, 7), (5, 512)]]
)
def test_rows_arrive_as_they_were(sizes):
    output_hook.attach()
    sent = {name: RawAnswer() for name in "ab"}
    chunks = {
        name: [rows(*size, seed) for seed, size in enumerate(sizes, ord(name))]
        for name in sent
    }
    for name, answer in sent.items():
        answer.add_captures(chunks[name])
    outputs = [
        output(name, {"own": 1, "eyesplice": answer.to_plain()})
        for name, answer in sent.items()
    ]
    outputs[1:1] = [output("x", None), output("y", {"own": 2})]
    frames = MsgpackEncoder().encode_into(
        EngineCoreOutputs(outputs=outputs), bytearray()
    )
    inside = sum(
        data.nbytes for found in chunks.values() for _, _, data in fields(found)
    )
    message = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in frames])
    if inside > 4096:
        assert len(frames[0]) < inside / 2, "rows are no part of the message"
    assert message.outputs[2].kv_transfer_params == {"own": 2}
    for arrived in (message.outputs[0], message.outputs[3]):
        answer = RawAnswer()
        answer.add_plain(arrived.kv_transfer_params["eyesplice"])
        found, expected = fields(answer.captures), fields(chunks[arrived.request_id])
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "odd",
    [
        *("text", 7, None, [], {}, {"captures": None}, {"captures": [7, "abc"]}),
        {"captures": [["abc", [1, 2], ["<i4", [2], 99], ["<i4", [2], -1]]]},
    ],
)
def test_a_clients_words_under_our_key_are_left_alone(odd):
    output_hook.attach()
    large = RawAnswer()
    large.add_captures([rows(3, 8192, 1)])
    outputs = [output("a", {"eyesplice": odd})]
    outputs.append(output("b", {"eyesplice": large.to_plain()}))
    frames = MsgpackEncoder().encode_into(
        EngineCoreOutputs(outputs=outputs), bytearray()
    )
    message = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in frames])
    assert message.outputs[0].kv_transfer_params["eyesplice"] == odd


def test_small_rows_do_not_hold_the_message_that_they_came_in():
    output_hook.attach()
    sent = RawAnswer()
    sent.add_captures([rows(2, 8, 0), rows(3, 8192, 1)])
    outputs = [output("a", {"eyesplice": sent.to_plain()})]
    frames = MsgpackEncoder().encode_into(
        EngineCoreOutputs(outputs=outputs), bytearray()
    )
    message = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    answer = RawAnswer()
    answer.add_plain(message.outputs[0].kv_transfer_params["eyesplice"])
    del message
    # A buffer that someone looks at cannot be resized.
    frames[0].clear()
    for ours, theirs in zip(
        fields(answer.captures), fields(sent.captures), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def fields(captured: list[Captured]) -> list[tuple[np.ndarray, ...]]:
    return [(each.captures, each.positions, each.data) for each in captured]


def test_a_message_in_one_buffer_is_left_alone():
    output_hook.attach()
    encoded = MsgpackEncoder().encode({"a": [1, 2]})
    assert MsgpackDecoder().decode(encoded[0]) == {"a": [1, 2]}
    assert MsgpackDecoder().decode(encoded) == {"a": [1, 2]}
