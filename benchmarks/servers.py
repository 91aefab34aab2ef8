"""vLLM's OpenAI server in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyesplice.benchmarks.records import Refused


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server, started on a free port."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        """Start a server.

        Args:
            name: for messages.
            command: its command line, to which host and port are added.
            log: file that receives what it prints.
            env: further environment variables.
        """
        self.name = name
        self.port = free_port()
        self._log = log
        self._began = time.monotonic()
        self.seconds = 0.0
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **env},
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float) -> "Server":
        """Wait until it serves.

        Raises:
            Refused: it ended, or is not ready after `seconds`; with its log's end.
        """
        while time.monotonic() - self._began < seconds:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
            except OSError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.5)
            else:
                self.seconds = time.monotonic() - self._began
                return self
        tail = "\n".join(self._log.read_text().splitlines()[-40:])
        raise Refused(f"the server {self.name} did not start; its log ends:\n{tail}")

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to a greedy completion.

        Raises:
            Refused: any status but 200.
        """
        data = json.dumps({"temperature": 0, **body}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise Refused(f"the server {self.name} answered: {text}") from error

    def close(self) -> None:
        """Stop it and what it started, and wait until its memory is free."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
