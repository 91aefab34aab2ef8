"""The real OpenAI server, with its worker in a process of its own, through HTTP."""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from safetensors.torch import save_file

import eyesplice
from eyesplice import App
from tests import tiny_models
from tests.oracle import Intervention, Oracle, ablate, add

PROMPT = [3, 14, 15, 92, 65, 35]
START_SECONDS = 240
API_KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "llama"
    tiny_models.make("llama", folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    """One word per token, "w0" to "w511", and a chat template that adds nothing."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(tiny_models.VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def vector() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tiny_models.HIDDEN_SIZE, generator=generator)


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(tiny_models.HIDDEN_SIZE, generator=generator)


class Server:
    def __init__(self, port: int, model: str) -> None:
        self.root, self.model = f"http://localhost:{port}", model

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] = HEADERS,
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of one HTTP request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.root + path,
            data,
            {"Content-Type": "application/json", **headers},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def complete(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a greedy completion."""
        return self.call("POST", "/v1/completions", self.greedy(**body))

    def greedy(self, **body: Any) -> dict[str, Any]:
        """The body of a greedy completion."""
        return {
            "model": self.model,
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
            **body,
        }

    def tokens(self, **body: Any) -> list[int]:
        status, answer = self.complete(**body)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


@pytest.fixture(scope="module")
def server(
    model: Path,
    vector: torch.Tensor,
    weight: torch.Tensor,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    names = importlib.metadata.entry_points(group="vllm.general_plugins").names
    assert "eyesplice" in names, "install eyesplice: pip install --no-deps -e ."
    folder = tmp_path_factory.mktemp("vectors")
    save_file({"v": vector}, folder / "v.safetensors")
    apps = []
    for app in _apps(vector, weight):
        app.save(folder / app.name)
        apps += ["--app", str(folder / app.name)]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    log = (folder / "server.log").open("w+")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "eyesplice.integration.cli.main", "serve"),
            *(str(model), "--vectors", str(folder), "--served-model-name", "tiny"),
            *apps,
            *("--host", "localhost", "--port", str(port), "--api-key", API_KEY),
            *("--dtype", "float32"),
            *("--max-model-len", "256", "--max-num-seqs", "8"),
            *("--compilation-config", '{"mode": 2, "backend": "eager"}'),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TRITON_INTERPRET": "0",
        },
        start_new_session=True,
    )
    try:
        _wait(process, port, log)
        yield Server(port, "tiny")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def _apps(vector: torch.Tensor, weight: torch.Tensor) -> list[App]:
    """`push` adds the vector, `remove` ablates the other one, `watch` reads its score."""
    push = eyesplice.write("steering_vector", vector=vector, scale=2.0)
    remove = eyesplice.write("ablate", vector=weight)
    watch = eyesplice.read("dot", weight=weight, name="score").cond("token_in(ends)")
    ends = {"decoded_endswith": "5"}
    return [
        App("push", [push.layers(1).submodule("residual.post")]),
        App("remove", [remove.layers(2).submodule("mlp.post")]),
        App(
            "watch", [watch.layers(1).submodule("residual.post")], None, {"ends": ends}
        ),
    ]


def _wait(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5)
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(1)
    log.seek(0)
    pytest.fail("the server did not start:\n" + log.read()[-4000:])


def steered(**write: Any) -> dict[str, Any]:
    spec = {"writes": [{"vector": "v", "layers": [1], **write}]}
    return {"vllm_xargs": {"eyesplice": json.dumps(spec)}}


def test_requests_are_steered_over_http(
    server: Server, model: Path, vector: torch.Tensor
) -> None:
    oracle = Oracle(model)
    plain = oracle.generate(PROMPT, 8)
    expected = oracle.generate(
        PROMPT, 8, [Intervention("residual.post", 1, add(vector, 2.0))]
    )
    assert plain != expected
    assert server.tokens() == plain
    assert server.tokens(**steered(scale=2.0)) == expected
    hotwire = json.dumps({"id": "v", "layer": 1, "scale": 2.0})
    assert server.tokens(vllm_xargs={"hotwire": hotwire}) == expected
    assert server.tokens(vllm_xargs={"eyesplice": "off"}) == plain


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ('{"writes": [{"vector": "pirate", "layers": 1}]}', ["pirate", "v"]),
        ('{"writes": [{"vector": "v", "layers": 99}]}', ["99", "0..3"]),
        ('{"writes": [{"vector": "v", "layers": 1, "scale": NaN}]}', ["scale", "NaN"]),
        ("[1]", ["eyesplice"]),
        ('{"steer": []}', ["steer", "writes"]),
    ],
)
def test_a_bad_request_is_answered_with_400_and_the_reason(
    server: Server, spec: str, words: list[str]
) -> None:
    before = server.tokens()
    status, answer = server.complete(vllm_xargs={"eyesplice": spec})
    assert status == 400, answer
    assert all(word in answer["error"]["message"] for word in words), answer
    assert server.tokens() == before


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.root + "/v1", api_key=API_KEY, max_retries=0)


def asking(spec: object) -> dict[str, Any]:
    text = spec if isinstance(spec, str) else json.dumps(spec)
    return {"vllm_xargs": {"eyesplice": text}, "return_token_ids": True}


def complete(client: OpenAI, spec: object = None, **more: Any) -> Any:
    return client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True} if spec is None else asking(spec),
        **more,
    )


def test_apps_are_named_one_or_several_at_once(
    client: OpenAI, model: Path, vector: torch.Tensor, weight: torch.Tensor
) -> None:
    oracle = Oracle(model)
    push = Intervention("residual.post", 1, add(vector, 2.0))
    remove = Intervention("mlp.post", 2, ablate(weight))
    cases = {
        "off": [],
        "push": [push],
        '{"apps": {"push": {"scale": -1.0}}}': [
            Intervention("residual.post", 1, add(vector, -1.0))
        ],
        '{"apps": {"push": {}, "remove": {}}}': [push, remove],
    }
    for spec, interventions in cases.items():
        answer = complete(client, spec)
        expected = oracle.generate(PROMPT, 8, interventions)
        assert answer.choices[0].token_ids == expected, spec
        found = getattr(answer, "eyesplice", None)
        assert (found is None) == (spec == "off"), spec
        if found is not None:
            counted = {write["function"]: write["tokens"] for write in found["writes"]}
            assert set(counted.values()) == {len(PROMPT) + 7}, counted
            assert [name.split("/")[0] for name in counted] == found["apps"]
    assert getattr(complete(client), "eyesplice", None) is None


def _ends(tokens: list[int]) -> list[int]:
    return [i for i, token in enumerate(tokens) if str(token).endswith("5")]


def test_scores_come_with_a_chat(client: OpenAI, model: Path) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": " ".join(f"w{n}" for n in PROMPT)}],
        max_tokens=8,
        temperature=0,
        extra_body=asking("watch"),
    )
    tokens = [*answer.prompt_token_ids, *answer.choices[0].token_ids][:-1]
    assert tokens[: len(PROMPT)] == PROMPT
    score = answer.eyesplice["scores"]["watch/score"]
    assert score["layer"] == 1 and score["positions"] == _ends(tokens)
    assert len(score["values"]) == len(score["positions"])


def test_a_stream_ends_with_the_answer(client: OpenAI) -> None:
    whole = complete(client, "watch").eyesplice
    for spec in ("watch", {"apps": {"watch": {}}, "stream_scores": True}):
        chunks = list(complete(client, spec, stream=True))
        found = [getattr(chunk, "eyesplice", None) for chunk in chunks]
        assert found[-1]["apps"] == ["watch"]
        parts = [answer["scores"].get("watch/score") for answer in found if answer]
        values = [value for part in parts if part for value in part["values"]]
        assert values == whole["scores"]["watch/score"]["values"]
        if isinstance(spec, str):
            assert found[:-1] == [None] * (len(chunks) - 1)
        else:
            assert any(found[:-1])


def test_requests_that_clients_abort_harm_nobody(server: Server) -> None:
    reads = [
        {"read": "dot", "name": f"r{layer}", "weight": "v", "layers": [layer]}
        for layer in range(3)
    ]
    spec = {"vllm_xargs": {"eyesplice": json.dumps({"reads": reads})}}
    before = server.tokens()
    several = server.greedy(stream=True, max_tokens=60, n=3, temperature=1, **spec)
    data = json.dumps(several).encode()
    # Some are gone before they have a token: there is room for eight.
    for _ in range(16):
        request = urllib.request.Request(
            server.root + "/v1/completions",
            data,
            {"Content-Type": "application/json", **HEADERS},
        )
        urllib.request.urlopen(request, timeout=60).close()
    # Long enough for all of them to end, if they were not aborted.
    assert server.tokens(max_tokens=240)[: len(before)] == before
    status, answer = server.complete(**spec)
    assert status == 200 and set(answer["eyesplice"]["scores"]) == {"r0", "r1", "r2"}


def test_several_choices_have_an_answer_each(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=[PROMPT, PROMPT[:4]],
        max_tokens=4,
        temperature=0,
        extra_body=asking("push"),
    )
    counts = [found["writes"][0]["tokens"] for found in answer.eyesplice["choices"]]
    assert counts == [len(PROMPT) + 3, 4 + 3]


CHAT = [{"role": "user", "content": " ".join(f"w{number}" for number in PROMPT)}]


def _post(server: Server, path: str, spec: str = "push", **body: Any) -> dict[str, Any]:
    xargs = {"vllm_xargs": {"eyesplice": spec}}
    greedy = {"model": "tiny", "temperature": 0}
    status, answer = server.call("POST", path, {**greedy, **xargs, **body})
    assert status == 200, answer
    return answer


def _events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "temperature": 0, "stream": True, **body}
    request = urllib.request.Request(
        server.root + path,
        json.dumps({**body, "vllm_xargs": {"eyesplice": "push"}}).encode(),
        {"Content-Type": "application/json", **HEADERS},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def _tokens_written(answer: dict[str, Any]) -> int:
    (write,) = answer["writes"]
    assert answer["apps"] == ["push"] and write["function"] == "push/0"
    tokens: int = write["tokens"]
    return tokens


def test_every_route_that_steers_gives_the_answer(server: Server) -> None:
    computed = len(PROMPT) + 3
    messages = {"messages": CHAT, "max_tokens": 4}
    responses = {"input": CHAT, "max_output_tokens": 4}
    full = [
        _post(server, "/v1/messages", **messages)["eyesplice"],
        _post(server, "/v1/responses", **responses)["eyesplice"],
        _events(server, "/v1/messages", **messages)[-2]["eyesplice"],
        _events(server, "/v1/responses", **responses)[-1]["response"]["eyesplice"],
    ]
    assert [_tokens_written(answer) for answer in full] == [computed] * 4
    batch = {"messages": [CHAT, CHAT], "max_tokens": 4}
    answer = _post(server, "/v1/chat/completions/batch", **batch)["eyesplice"]
    assert [_tokens_written(one) for one in answer["choices"]] == [computed] * 2
    for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
        assert "eyesplice" not in _post(server, path, "off", **body)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_beam_search_is_refused_rather_than_not_steered(
    server: Server, path: str
) -> None:
    given = {"prompt": PROMPT} if path == "completions" else {"messages": CHAT}
    body = {"model": "tiny", "use_beam_search": True, "max_tokens": 2, **given}
    for key in ("eyesplice", "hotwire"):
        body["vllm_xargs"] = {key: "push"}
        status, answer = server.call("POST", f"/v1/{path}", body)
        assert status == 400 and "beam" in answer["error"]["message"], answer


def test_an_app_is_switched_off_and_on_again(server: Server, client: OpenAI) -> None:
    steered = complete(client, "push").choices[0].token_ids
    status, app = server.call("POST", "/v1/eyesplice/apps/push/disable")
    assert (status, app["name"], app["enabled"]) == (200, "push", False)
    with pytest.raises(BadRequestError, match="push"):
        complete(client, "push")
    assert complete(client, "remove").choices
    status, app = server.call("POST", "/v1/eyesplice/apps/push/enable")
    assert (status, app["enabled"]) == (200, True)
    assert complete(client, "push").choices[0].token_ids == steered


def test_the_routes_tell_what_is_deployed(server: Server) -> None:
    status, found = server.call("GET", "/v1/eyesplice")
    assert status == 200 and found["version"] == eyesplice.__version__
    assert found["sites"]["armed"] > 0 and found["bank"]["used"] == 1 + 4
    assert [app["name"] for app in found["apps"]] == ["push", "remove", "watch"]
    _, sites = server.call("GET", "/v1/eyesplice/sites")
    assert {"residual.post", "mlp.pre"} <= {row["submodule"] for row in sites["sites"]}
    _, vectors = server.call("GET", "/v1/eyesplice/vectors")
    names = [entry["name"] for entry in vectors["vectors"]]
    assert "v" in names and len(names) == 4
    for name in names:
        _, one = server.call("GET", f"/v1/eyesplice/vectors/{name}")
        assert one["name"] == name and one["shape"] == [tiny_models.HIDDEN_SIZE]
    _, app = server.call("GET", "/v1/eyesplice/apps/watch")
    assert app["functions"] == ["watch/score"] and app["enabled"]
    assert server.call("GET", "/v1/eyesplice/apps")[1]["apps"][2] == app


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/vectors/missing", 404),
        ("GET", "/apps/missing", 404),
        ("POST", "/apps/missing/enable", 404),
        ("PUT", "/apps/new", 403),
        ("DELETE", "/apps/push", 403),
        ("PUT", "/vectors/new", 403),
        ("DELETE", "/vectors/v", 403),
    ],
)
def test_what_is_not_there_or_not_allowed(
    server: Server, method: str, path: str, status: int
) -> None:
    found, answer = server.call(method, "/v1/eyesplice" + path)
    assert found == status
    assert answer["error"]["code"] == status and answer["error"]["message"]


def test_the_routes_are_behind_the_servers_key(server: Server) -> None:
    for path in ("/v1/eyesplice", "/v1/eyesplice/apps"):
        assert server.call("GET", path, headers={})[0] == 401
