"""vLLM's own `vllm bench serve`, many times in one process, by JSON lines on stdin.

A line holds the command's arguments; the answer is what the command measured. Keeping
the process saves the seconds that importing vLLM takes from every run.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyesplice.benchmarks.records import Refused


class ServeClient:
    """The parent's side: runs the command in the other process."""

    def __init__(self, log: Path) -> None:
        """Start the process; `log` receives what the command prints."""
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "eyesplice.benchmarks.serve_client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, "VLLM_PLUGINS": ""},
                text=True,
            )

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What one run of `vllm bench serve` measured.

        Raises:
            Refused: the process died; with its log's end.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        if self._process.poll() is None:
            self._process.stdin.write(json.dumps(list(arguments)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-30:])
            raise Refused(f"vllm bench serve died; its log ends:\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Answer each line of stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The command prints its own table: keep the answers apart from it.
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        result = bench_serve(parser.parse_args(json.loads(line)))
        numbers = {k: v for k, v in result.items() if not isinstance(v, list)}
        print(json.dumps(numbers, default=float), file=answers, flush=True)


if __name__ == "__main__":
    main()
