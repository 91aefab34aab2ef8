"""Compilations that run in threads of their own until someone needs their result.

Triton holds Python's lock for less than a tenth of a compilation, so that threads run
beside whatever else the process does.
"""

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Thread
from typing import Final

import torch

logger = logging.getLogger("vllm.eyesplice")

MAX_THREADS: Final = 4
"""More would take cores from the compiler's own processes."""

_Job = tuple[Hashable, Future[None], Callable[[], object]]

_waiting: Final[deque[_Job]] = deque()
_jobs: Final[dict[Hashable, Future[None]]] = {}
_threads: Final[list[Thread]] = []


def submit(key: Hashable, job: Callable[[], object]) -> None:
    """Queue a job for the threads that `start` makes; nothing if one is under its key.

    Args:
        key: what `settle` knows the job by.
        job: what to do. Its errors are ignored.
    """
    if key not in _jobs:
        future = _jobs[key] = Future()
        _waiting.append((key, future, job))


def start(device: int | None) -> None:
    """Work on what is queued, first come, first served.

    Args:
        device: the CUDA device that is current for the jobs, None for no device.
    """
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    wanted = min(MAX_THREADS, os.cpu_count() or 1, len(_waiting)) - len(_threads)
    for _ in range(wanted):
        thread = Thread(
            target=_work, args=(device,), name="eyesplice-compile", daemon=True
        )
        thread.start()
        _threads.append(thread)


def any_job() -> bool:
    """Whether `settle` could find a job at all: one that waits or runs."""
    return bool(_jobs)


def settle(key: Hashable) -> None:
    """Wait for the job if it runs; if it has not begun, it is the caller's to do."""
    future = _jobs.pop(key, None)
    if future is not None and not future.cancel():
        future.result()


def stop() -> None:
    """Begin no further job, and wait for those that run.

    A thread that comes back from compiled code into an interpreter that ends would
    abort the process.
    """
    while (taken := _taken()) is not None:
        taken[1].cancel()
    for thread in _threads:
        thread.join()


def _work(device: int | None) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        while (taken := _taken()) is not None:
            _do(*taken)
    except Exception:
        logger.debug("a thread that compiles ahead has ended", exc_info=True)


def _taken() -> _Job | None:
    """The next job; None if there is none. Any thread may take the last one."""
    try:
        return _waiting.popleft()
    except IndexError:
        return None


def _do(key: Hashable, future: Future[None], job: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        job()
    except Exception:
        logger.debug("not compiled ahead", exc_info=True)
    finally:
        future.set_result(None)
        # A launch looks for jobs as long as there is one: many are never asked for.
        if _jobs.get(key) is future:
            _jobs.pop(key, None)


atexit.register(stop)
# A child has the jobs, but none of the threads.
for _kept in (_jobs, _waiting, _threads):
    os.register_at_fork(after_in_child=_kept.clear)
