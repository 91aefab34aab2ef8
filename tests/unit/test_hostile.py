"""Thousands of hostile requests and app files: refused by name or accepted, and soon."""

import contextlib
import time
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import save_file

import eyesplice
from eyesplice import SpecError
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import Request, parse_canonical, parse_request
from tests.hostile import Names, request
from tests.hostile_apps import TENSORS, app_file
from tests.request_world import context

REQUESTS, APPS, CHUNK = 2000, 2000, 250
LONGEST = 2.0
"""Seconds of this process that one may take."""

CONTEXT = context(64, max_scores=64)
NAMES = Names(("pirate", "calm"), ("up", "down"), ("guarded", "asleep"), routed=True)


def _served(extra_args: object) -> Request | None:
    """What is accepted, None for what is refused."""
    try:
        found = parse_request(extra_args, CONTEXT)  # type: ignore[arg-type]
        if found is not None:
            lower(found, CONTEXT)
    except SpecError as error:
        assert len(str(error)) < 10_000
        str(error).encode("utf-8", "surrogatepass")
        return None
    return found or Request()


@pytest.mark.parametrize("first", range(0, REQUESTS, CHUNK))
def test_a_hostile_request_is_served_or_refused(first: int):
    accepted = 0
    for number in range(first, first + CHUNK):
        extra_args = request(number, NAMES)
        start = time.process_time()
        found = _served(extra_args)
        assert time.process_time() - start < LONGEST, number
        if found is not None and found.functions:
            accepted += 1
            assert parse_canonical(found.canonical(), CONTEXT) == found, number
    assert CHUNK / 50 < accepted < CHUNK / 2


@pytest.mark.parametrize("first", range(0, APPS, CHUNK))
def test_a_hostile_app_is_loaded_or_refused(first: int, tmp_path: Path):
    save_file(TENSORS, tmp_path / "outside.safetensors")
    accepted = 0
    for number in range(first, first + CHUNK):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = app_file(number, folder)
        start = time.process_time()
        try:
            app = eyesplice.load_app(path)
        except SpecError as error:
            assert len(str(error)) < 10_000
        else:
            accepted += 1
            assert eyesplice.App.from_dict(app.to_dict()) == app, number
        assert time.process_time() - start < LONGEST, number
    assert CHUNK / 50 < accepted < CHUNK / 2
    assert not list(tmp_path.parent.glob("evil*"))


WORST = {
    "a zip entry that leaves its folder": b"../../evil",
    "a tag": b"!!python/object/apply:os.system",
    "a pickle": b"\x80\x04",
    "a huge shape": b"549755813888, 549755813888",
    "deep nesting": b"[" * 2000,
}


def test_the_worst_kinds_are_among_them(tmp_path: Path):
    missing = dict(WORST)
    for number in range(APPS):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = _content(app_file(number, folder))
        missing = {kind: mark for kind, mark in missing.items() if mark not in content}
        if not missing:
            return
    raise AssertionError(missing)


def _content(path: Path) -> bytes:
    """Everything that is read when the path is loaded."""
    if path.name in ("app.json", "app.zip"):
        data = path.read_bytes()
        # Damaged archives keep what their bytes say.
        with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
            data += b"".join(archive.read(name) for name in archive.namelist())
        return data
    folder = path if path.is_dir() else path.parent
    tensors = folder / "tensors.safetensors"
    found = (folder / "app.yaml").read_bytes()
    return found if tensors.is_symlink() else found + tensors.read_bytes()
