"""Engines in processes of their own, so that two can share a GPU and take turns."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class EngineProcess:
    """One engine; `ready` holds what it says of itself once it has started."""

    def __init__(
        self,
        name: str,
        log: Path,
        *,
        plugin: bool,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Start an engine.

        Args:
            name: for messages.
            log: file that receives what vLLM prints.
            plugin: whether plugins load; without, the engine is plain vLLM.
            env: further environment variables.
            arguments: of `vllm.LLM`.
        """
        self.name = name
        self._log = log
        environment = {**os.environ, **(env or {})}
        if not plugin:
            environment["VLLM_PLUGINS"] = ""
        child = Path(__file__).with_name("engine_child.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=environment,
            text=True,
        )
        self._send(arguments)
        self.ready: dict[str, Any] = {}

    def wait(self) -> "EngineProcess":
        """Wait until the engine serves."""
        self.ready = self._receive()
        return self

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        extra_args: Sequence[dict[str, Any] | None],
        logprobs: int | None = None,
    ) -> dict[str, Any]:
        """Greedy tokens and chosen logprobs of one batch."""
        self._send(
            {
                "kind": "generate",
                "prompts": [list(p) for p in prompts],
                "max_tokens": max_tokens,
                "extra_args": list(extra_args),
                "logprobs": logprobs,
            }
        )
        return self._receive()

    def decode(self, **command: Any) -> dict[str, Any]:
        """Seconds of each decode step: `seconds` (wall), `device_seconds`."""
        return self.ask("decode", **command)

    def ask(self, kind: str, **command: Any) -> dict[str, Any]:
        """The answer to any command of `engine_child`."""
        self._send({"kind": kind, **command})
        return self._receive()

    def close(self) -> None:
        """Stop the engine and wait until its memory is free."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-40:])
            raise RuntimeError(f"engine {self.name} died; its log ends:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer
