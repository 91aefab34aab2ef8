"""Who lends memory to whom, as the parent of two engines arranges it: see `shared_memory`.

Without torch, which takes seconds to import and which not every case needs.
"""

import json
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "EYESPLICE_BENCH_MEMORY"
"""Variable: where the two meet, a folder that only this benchmark writes."""

ROLE: Final = "EYESPLICE_BENCH_MEMORY_ROLE"
"""Variable: "lend" or "borrow"."""

WORKER: Final = "eyesplice.benchmarks.shared_worker.SharedWorker"
"""vLLM's `worker_cls`."""


def can_lend() -> bool:
    """Whether there is device memory to lend."""
    import torch

    return torch.cuda.is_available()


def variables(folder: Path, role: str) -> dict[str, str]:
    """Environment of an engine that lends its memory or borrows the other's."""
    return {FOLDER: str(folder), ROLE: role}


def borrowed(folder: Path) -> dict[str, Any]:
    """What each rank of the borrower has from the lender, and why not: by rank."""
    found = folder.glob("borrowed-*")
    return {f.name.partition("-")[2]: json.loads(f.read_text()) for f in found}
