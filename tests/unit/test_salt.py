"""The compile-cache salt: what changes it, and what must not."""

import shutil
import types
from pathlib import Path

import pytest

import eyesplice.fx_passes
import eyesplice.ops
from eyesplice import _version
from eyesplice.fx_passes import plan


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Copies of both rooms that `salt` reads, to be edited."""
    for package in (eyesplice.ops, eyesplice.fx_passes):
        name = package.__name__.rsplit(".", 1)[-1]
        folder = tmp_path / name
        shutil.copytree(
            Path(package.__file__).parent, folder, ignore=lambda *_: ["__pycache__"]
        )
        copy = types.SimpleNamespace(__file__=str(folder / "__init__.py"))
        monkeypatch.setattr(plan, name, copy)
    return tmp_path


def test_equal_deployments_have_equal_salts(rooms):
    copied = plan.salt(["sites"])
    assert copied == plan.salt(["sites"])
    assert copied != plan.salt(["other sites"])
    assert copied != plan.salt([])


@pytest.mark.parametrize(
    "file", ["ops/kernel_boundary.py", "ops/layout.py", "fx_passes/splice.py"]
)
def test_changing_a_file_of_the_pass_or_the_ops_changes_it(rooms, file):
    before = plan.salt(["sites"])
    path = rooms / file
    path.write_text(path.read_text() + "\n# another line\n")
    assert plan.salt(["sites"]) != before


def test_a_new_file_and_a_new_version_change_it(rooms, monkeypatch):
    before = plan.salt(["sites"])
    (rooms / "ops" / "extra.py").write_text("")
    grown = plan.salt(["sites"])
    assert grown != before
    monkeypatch.setattr(_version, "__version__", "9.9.9")
    assert plan.salt(["sites"]) != grown


def test_other_files_do_not(rooms):
    before = plan.salt(["sites"])
    (rooms / "ops" / "notes.txt").write_text("not code")
    assert plan.salt(["sites"]) == before
