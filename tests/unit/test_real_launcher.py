"""Kept launches through Triton's own launcher, against a CUDA driver that notes them.

The stand-in of `test_relaunch` is not what Triton compiles for a GPU; this is, whatever
the version that is installed.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_FOUND = importlib.util.find_spec("triton.backends.nvidia")
_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.skipif(_FOUND is None, reason="needs Triton's NVIDIA backend")
def test_a_kept_launch_is_what_triton_would_launch(tmp_path: Path) -> None:
    assert _FOUND is not None and _FOUND.submodule_search_locations
    include = Path(_FOUND.submodule_search_locations[0]) / "include"
    if not (include / "cuda.h").exists():
        pytest.skip("Triton has no cuda.h")
    source = _ROOT / "tests" / "fake_cuda" / "libcuda.c"
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", f"-I{include}", str(source)),
            *("-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")),
        ],
        check=True,
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    env["LD_LIBRARY_PATH"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.fake_cuda.launches"]
    done = subprocess.run(
        command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Of the two whose launchers are known, none may be called the long way.
    version = importlib.metadata.version("triton")
    past = 20 if version.startswith(("3.6.", "3.9.")) else 0
    same, direct, by_torch = (int(part.split()[0]) for part in done.stdout.split(", "))
    assert same == 20
    assert direct >= past
    # Those that start early, of up to 32 tokens, it cannot launch.
    assert by_torch == (14 if hasattr(torch._C, "_StaticCudaLauncher") else 0)
