"""Answers on their way into responses and streams, with stand-ins for vLLM's objects."""

import asyncio
import json
from types import SimpleNamespace

from eyesplice.integration import http_answers


def part(answer=None, finish=None, text="x", index=0):
    return SimpleNamespace(
        index=index, finish_reason=finish, text=text, eyesplice=answer
    )


def output(answer=None, finish=None, text="x", index=0):
    return SimpleNamespace(outputs=[part(answer, finish, text, index)])


def scores(*values, first=0):
    positions = list(range(first, first + len(values)))
    score = {"layer": 1, "values": list(values), "positions": positions}
    return {"scores": {"a/0": score}}


async def each(items):
    for item in items:
        yield item


def line(finish=None, index=0, **choice):
    body = {"choices": [{"index": index, "finish_reason": finish, **choice}]}
    return f"data: {json.dumps(body)}\n\n"


async def chat_stream(_self, _request, outputs):
    yield line(delta={"role": "assistant"})
    async for found in outputs:
        one = found.outputs[0]
        # Some parsers hold text back: such an output gives no chunk.
        if one.text:
            yield line(one.finish_reason, one.index, delta={"content": one.text})
    yield 'data: {"choices": [], "usage": {}}\n\n'
    yield "data: [DONE]\n\n"


async def completion_stream(_self, request, _prompts, outputs):
    async for prompt, found in outputs:
        one = found.outputs[0]
        yield line(one.finish_reason, one.index + prompt * request.n, text=one.text)
    yield "data: [DONE]\n\n"


def collect(stream):
    async def run():
        return [chunk async for chunk in stream]

    return asyncio.run(run())


def answers(chunks):
    """The answer of each chunk, None where there is none."""
    assert chunks[-1] == "data: [DONE]\n\n"
    assert all(chunk.endswith("\n\n") for chunk in chunks)
    bodies = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
    return [body.get("eyesplice") for body in bodies]


def chat(*outputs):
    stream = http_answers._chat_stream(chat_stream, None, None, each(outputs))
    return answers(collect(stream))


def test_the_last_chunk_of_a_chat_has_the_answer():
    found = chat(output(), output(), output({"apps": ["a"]}, "stop"))
    assert found == [None, None, None, {"apps": ["a"]}, None]


def test_a_stream_without_an_answer_is_handed_on_untouched():
    given = [output(), output(finish="stop")]
    plain = collect(chat_stream(None, None, each(given)))
    stream = http_answers._chat_stream(chat_stream, None, None, each(given))
    assert collect(stream) == plain


def test_scores_that_come_with_each_output_are_in_each_chunk():
    last = {**scores(0.25, first=2), "apps": ["a"]}
    found = chat(output(scores(0.5, 1.0)), output(last, "stop"))
    assert found == [None, scores(0.5, 1.0), last, None]


def test_scores_that_no_chunk_carried_come_with_the_next():
    found = chat(
        output(scores(0.5, 1.0), text=""), output(scores(2.0, first=2), "stop")
    )
    assert found == [None, scores(0.5, 1.0, 2.0), None]


def test_each_choice_of_a_chat_has_its_answer_at_its_end():
    found = chat(
        output(index=0),
        output({"apps": ["b"]}, "stop", index=1),
        output(index=0),
        output({"apps": ["a"]}, "stop", index=0),
    )
    assert found == [None, None, {"apps": ["b"]}, None, {"apps": ["a"]}, None]


def test_each_choice_of_a_completion_of_several_prompts_has_its_answer():
    outputs = each(
        [
            (0, output()),
            (1, output({"apps": ["b"]}, "length", index=1)),
            (0, output({"apps": ["a"]}, "length")),
        ]
    )
    stream = http_answers._completion_stream(
        completion_stream, None, SimpleNamespace(n=2), None, outputs
    )
    assert answers(collect(stream)) == [None, {"apps": ["b"]}, {"apps": ["a"]}]


def full(*outputs):
    def respond(_self, _outputs, *_rest):
        return SimpleNamespace(choices=[])

    found = http_answers._completion_full(respond, None, list(outputs), "request")
    return getattr(found, "eyesplice", "absent")


def test_full_completions():
    assert full(output(), output()) == "absent"
    assert full(output({"apps": []})) == {"apps": []}
    assert full(output({"apps": []}), output()) == {"choices": [{"apps": []}, None]}
    two = SimpleNamespace(outputs=[part(), part({"apps": []}, index=1)])
    assert full(two) == {"choices": [None, {"apps": []}]}


def test_full_chats_and_errors():
    def ask(response):
        async def respond(_self, _request, outputs):
            assert len([found async for found in outputs]) == 2
            return response

        given = each([output(), output({"apps": ["a"]}, "stop")])
        asyncio.run(http_answers._chat_full(respond, None, None, given))
        return response

    assert ask(SimpleNamespace(choices=[])).eyesplice == {"apps": ["a"]}
    assert not hasattr(ask(SimpleNamespace(error="no")), "eyesplice")
