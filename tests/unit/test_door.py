"""The root package: what it offers, what importing it loads, and the rooms' one name."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import eyesplice

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ops", "fx_passes", "integration")

DOCUMENTED = [
    "App",
    "SpecError",
    "__version__",
    "deployed",
    "load_app",
    "read",
    "splice_pass",
    "write",
]

TORCH_ALONE = (
    "import torch; print([n for n in ('vllm', 'triton', 'transformers') "
    "if n in sys.modules])"
)


def in_fresh_process(code: str) -> str:
    """What `code` prints in a new interpreter that finds this same package."""
    found = Path(eyesplice.__file__).resolve().parents[1]
    code = f"import sys; sys.path.insert(0, {str(found)!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_all_is_sorted_and_as_documented() -> None:
    assert eyesplice.__all__ == sorted(eyesplice.__all__)
    assert eyesplice.__all__ == DOCUMENTED


@pytest.mark.parametrize("name", eyesplice.__all__)
def test_every_name_of_the_door_is_there_and_explained(name: str) -> None:
    value = getattr(eyesplice, name)
    assert isinstance(value, str) or inspect.getdoc(value)


def test_importing_the_door_loads_no_engine() -> None:
    heavy = ("vllm", "triton", "torch", "transformers")
    code = f"import eyesplice; print([m for m in {heavy} if m in sys.modules])"
    assert in_fresh_process(code) == "[]"


def test_declaring_an_app_loads_no_engine() -> None:
    code = (
        "import torch, eyesplice as m; "
        "m.App('a', [m.write('ablate', vector=torch.ones(4)).layers('all')]); "
        "print([n for n in ('vllm', 'triton', 'transformers') if n in sys.modules])"
    )
    # Some builds of torch load Triton by themselves.
    assert in_fresh_process(code) in ("[]", in_fresh_process(TORCH_ALONE))


def test_an_unknown_name_of_the_door_is_an_attribute_error() -> None:
    assert "load_app" in dir(eyesplice)
    with pytest.raises(AttributeError, match="no attribute 'loadapp'"):
        _ = eyesplice.loadapp


def test_vllm_finds_the_pass_where_it_looks() -> None:
    # vLLM resolves the pass flag as __import__("eyesplice").__dict__["splice_pass"].
    assert callable(vars(__import__("eyesplice"))["splice_pass"])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_a_second_name(room: str) -> None:
    spec = importlib.util.spec_from_file_location(room, ROOT / room / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=f"import eyesplice.{room}, not {room}"):
        spec.loader.exec_module(module)
