"""Without a GPU the kernels run in Triton's interpreter, on CPU tensors."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError("Triton came before its interpreter: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
