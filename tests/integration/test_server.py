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
from safetensors.torch import save_file

from tests import tiny_models
from tests.oracle import Intervention, Oracle, add

PROMPT = [3, 14, 15, 92, 65, 35]
START_SECONDS = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="module")
def vector() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tiny_models.HIDDEN_SIZE, generator=generator)


class Server:
    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model

    def complete(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a greedy completion."""
        request = urllib.request.Request(
            f"http://localhost:{self.port}/v1/completions",
            json.dumps(
                {
                    "model": self.model,
                    "prompt": PROMPT,
                    "max_tokens": 8,
                    "temperature": 0,
                    "return_token_ids": True,
                    **body,
                }
            ).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def tokens(self, **body: Any) -> list[int]:
        status, answer = self.complete(**body)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


@pytest.fixture(scope="module")
def server(
    model: Path, vector: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    names = importlib.metadata.entry_points(group="vllm.general_plugins").names
    assert "eyesplice" in names, "install eyesplice: pip install --no-deps -e ."
    folder = tmp_path_factory.mktemp("vectors")
    save_file({"v": vector}, folder / "v.safetensors")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    log = (folder / "server.log").open("w+")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "eyesplice.integration.cli.main", "serve"),
            *(str(model), "--vectors", str(folder), "--served-model-name", "tiny"),
            *("--host", "localhost", "--port", str(port)),
            *("--skip-tokenizer-init", "--dtype", "float32"),
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
