"""Hostile app files: whole apps with a few things changed for the worse.

A number makes a file or a folder, the same one every time. Nothing here knows what is
refused.
"""

import base64
import io
import json
import pickle
import random
import stat
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

from tests.hostile import soup

TENSORS: Final = {
    "w": torch.arange(8.0) - 3,
    "v": torch.ones(2, 8).half(),
    "b": torch.tensor([0.5, -1.0]),
}
YAML: Final = """\
name: guarded
tensors: tensors.safetensors
token_sets: {listed: [198, 271], ends: {decoded_endswith: "."}}
functions:
  - {read: probe, name: r0, weight: w, layers: [1], submodule: residual.post}
  - {read: sae, weight: v, bias: b, layers: [1], over: prompt}
  - {write: steering_vector, vector: w, scale: 1.5, layers: [2],
     submodule: attention.post, when: token_in(listed), gate: r0 >= 0}
  - {write: affine, u: v, v: v, bias: b, layers: "0-3", when: not after(token_in(ends))}
"""
LINES: Final = (
    "!!python/object/apply:os.system ['true']",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\n"
    "e: &e [*d, *d, *d, *d, *d, *d, *d, *d]\nf: [*e, *e, *e, *e, *e, *e, *e, *e]",
    "functions: &f [*f]",
    "a: &a {x: 1}\nb: {<<: *a}",
    "name: guarded",
    "name: off",
    "name: ../../etc",
    "tensors: /etc/passwd",
    "tensors: ../outside.safetensors",
    "tensors: link.safetensors",
    "tensors: up/outside.safetensors",
    "tensors: fifo.safetensors",
    "tensors: pickle.safetensors",
    "tensors: {v: {dtype: float32, shape: [1], data: AAAA}}",
    "functions: []",
    "functions: [3, null, {}]",
    "token_sets: {listed: [-1, .nan, 1e99]}",
    "token_sets: " + "{a: " * 40 + "1" + "}" * 40,
    "---\nname: other",
    "%YAML 9999999999999.9\n---",
    "x: " + "9" * 5000,
    "x: " + "[" * 2000,
    "- " * 2000,
    'x: "\\UFFFFFFFF"',
    "x: \0",
    "x: .inf",
    "x: 2024-01-01",
    "\t- tab",
    "? [a]\n: 1",
    "x: " + "y" * 2**20,
    "x: [" + "1," * 100_001 + "]",
    "x:\n" + "- &a 1\n" * 99_000,
    "".join(f"key{n}: 1\n" for n in range(49_000)),
    '"x": "' + "\\x41" * 250_000 + '"',
)
_NOISE: Final = (
    *"[]{}&*!|>'\"%@`#:,-?\\\n\t\0é😀",
    "<<",
    "~",
    ".nan",
    "- ",
    ": ",
    "1e999",
)
_NAMES: Final = ("../../evil", "/etc/evil", "..\\evil", "c:evil", "a\0b", "x" * 300, "é",
                 "app.yaml", "a/app.yaml", "tensors.safetensors", "./app.yaml", "", ".",
                 "..")  # fmt: skip


def app_file(number: int, folder: Path) -> Path:
    """The path to load: a folder, or a file in it.

    Args:
        number: any.
        folder: an empty folder, in a folder that holds `outside.safetensors`.
    """
    rng = random.Random(f"app {number}")
    make = rng.choice((_folder, _folder, _zip, _zip, _json))
    return make(rng, folder)


def _folder(rng: random.Random, folder: Path) -> Path:
    text, tensors = _contents(rng)
    (folder / "app.yaml").write_bytes(text)
    (folder / "tensors.safetensors").write_bytes(tensors)
    (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
    (folder / "up").symlink_to(folder.parent)
    (folder / "pickle.safetensors").write_bytes(pickle.dumps({"v": [1.0]}))
    if rng.random() < 0.1:
        (folder / "tensors.safetensors").unlink()
        (folder / "tensors.safetensors").symlink_to(rng.choice(
            ("tensors.safetensors", "/etc/passwd", "/dev/zero", "../outside.safetensors")
        ))  # fmt: skip
    return rng.choice((folder, folder / "app.yaml"))


def _contents(rng: random.Random) -> tuple[bytes, bytes]:
    """The text and the tensors of an app, mostly one of them damaged, or both."""
    kind = rng.random()
    if kind < 0.15:
        return YAML.encode(), save(TENSORS)
    text = _yaml(rng) if kind < 0.7 else YAML.encode()
    return text, _stored(rng) if kind > 0.6 else save(TENSORS)


def _yaml(rng: random.Random) -> bytes:
    lines = YAML.splitlines()
    kind = rng.random()
    if kind < 0.5:
        lines.insert(rng.choice((0, 1, len(lines))), rng.choice(LINES))
    elif kind < 0.6:
        lines = [rng.choice(LINES)]
    text = "\n".join(lines)
    if kind > 0.6:
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(_NOISE) + text[at + rng.randint(0, 4) :]
    if rng.random() < 0.2:
        quoted = json.dumps(soup(rng), ensure_ascii=rng.random() < 0.5)
        text = text.replace("r0 >= 0", quoted).replace("token_in(listed)", quoted)
    data = text.encode("utf-8", "surrogatepass")
    return data if rng.random() < 0.9 else _cut(rng, data)


def _cut(rng: random.Random, data: bytes) -> bytes:
    """The bytes, truncated or with some of them changed."""
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data) + 1)]
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _stored(rng: random.Random) -> bytes:
    """A safetensors file, or something else of its name."""
    good = save(TENSORS)
    kind = rng.randrange(5)
    if kind == 0:
        return _cut(rng, good)
    if kind == 1:
        size = rng.choice((0, 2**20, 2**21, 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", size) + rng.choice((good, b" " * 2**21, b"[" * 10**5))
    if kind == 2:
        return rng.choice((b"", b"\x80", pickle.dumps(TENSORS), b"PK\x03\x04" + good))
    changes: dict[str, Any] = {
        "dtype": rng.choice(("I64", "F8_E4M3", "BOOL", "F32", ["F32"], 3, None)),
        "shape": rng.choice(
            ([2**39, 2**39], [-2], [0], [True], [8.0], [1] * 9, "8", [8])
        ),
        "data_offsets": rng.choice(
            ([0, 2**62], [8, 0], [-8, 24], [0.0, 32.0], [0], None)
        ),
    }
    item = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}
    key = rng.choice(tuple(changes))
    values = struct.pack("<8f", *rng.choices((1.0, float("nan"), float("inf")), k=8))
    header = json.dumps({rng.choice(("w", "é\0", "")): {**item, key: changes[key]}})
    return struct.pack("<Q", len(header)) + header.encode() + values


def _zip(rng: random.Random, folder: Path) -> Path:
    text, tensors = _contents(rng)
    files = [("app.yaml", text), ("tensors.safetensors", tensors)]
    if rng.random() < 0.3:
        files = [(f"a/b/{name}", data) for name, data in files]
    if rng.random() < 0.4:
        bomb = bytes(rng.choice((0, 1, 2**22)))
        files.insert(rng.randrange(3), (rng.choice(_NAMES), bomb))
    if rng.random() < 0.1:
        files += [(f"f{n}", b"") for n in range(rng.choice((60, 70, 3000)))]
    data = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(data, "w") as archive:
        warnings.simplefilter("ignore")
        for name, content in files:
            archive.writestr(*_entry(rng, name), content, zipfile.ZIP_DEFLATED)
    found = data.getvalue()
    if rng.random() < 0.3:
        found = _cut(rng, found)
    if rng.random() < 0.2:
        # The sizes that the directory states, for 4 GiB and more.
        found = found.replace(struct.pack("<I", len(text)), b"\xff\xff\xff\x7f")
    target = folder / "app.zip"
    target.write_bytes(found)
    return target


def _entry(rng: random.Random, name: str) -> tuple[zipfile.ZipInfo]:
    entry = zipfile.ZipInfo()
    entry.filename = name
    if rng.random() < 0.1:
        kind = rng.choice((stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR, stat.S_IFCHR))
        entry.external_attr, entry.create_system = (kind | 0o777) << 16, 3
    return (entry,)


def _json(rng: random.Random, folder: Path) -> Path:
    tensors = {
        name: {
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": list(t.shape),
            "data": base64.b64encode(t.numpy().tobytes()).decode(),
        }
        for name, t in TENSORS.items()
    }
    functions: list[Any] = [
        {"read": "probe", "name": "r0", "weight": "w", "layers": 1},
        {"write": "ablate", "vector": "w", "layers": "all", "gate": "r0 > 0"},
    ]
    value = {"name": "guarded", "functions": functions, "tensors": tensors}
    change = rng.choice(_JSON)
    change(rng, value)
    data = json.dumps(value).encode()
    target = folder / "app.json"
    target.write_bytes(data if rng.random() < 0.6 else _cut(rng, data))
    return target


_JSON: Final[tuple[Callable[[random.Random, dict[str, Any]], Any], ...]] = (
    lambda rng, v: v["tensors"]["w"].update(
        data=rng.choice(("*" * 44, "=" * 44, "é", "", "not base64 !", "AADAfw==" * 8))
    ),
    lambda rng, v: v["tensors"]["w"].update(shape=rng.choice(([2**39] * 2, [9], [-8]))),
    lambda rng, v: v["tensors"]["w"].update(
        dtype=rng.choice(("int8", "object", "bfloat16", [1]))
    ),
    lambda rng, v: v["tensors"].update({rng.choice(("a/b", "", "x" * 99)): {}}),
    lambda rng, v: v["functions"][1].update(gate=soup(rng)),
    lambda rng, v: v["functions"][1].update(when=soup(rng)),
    lambda rng, v: v["functions"].extend([v["functions"][1]] * rng.choice((9, 3000))),
    lambda rng, v: v.update(token_sets=rng.choice(([1], {"a": []}, {"a": {"b": "c"}}))),
    lambda rng, v: v.update(tensors=rng.choice((3, "tensors.safetensors", [], None))),
    lambda rng, v: v.update(name=rng.choice(("off", "../x", "", 3, "x" * 99))),
    lambda rng, v: v.update({soup(rng): rng.choice((1, float("nan")))}),
)
