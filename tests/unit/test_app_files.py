"""Apps in files: there and back, and every hostile file refused by name."""

import base64
import contextlib
import copy
import io
import json
import os
import pickle
import stat
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

import eyesplice as m
from eyesplice.fx_passes import app_files, app_yaml, token_sets
from eyesplice.fx_passes.app_files import app_from_bytes, app_from_zip, read_safetensors
from eyesplice.fx_passes.app_yaml import dump_yaml, load_yaml
from eyesplice.fx_passes.plain import plain
from tests.unit.test_builder import V, guarded

YAML = """\
name: guarded
tensors: tensors.safetensors
token_sets: {trigger_list: [198, 271]}
functions:
  - {read: probe, name: gate18, weight: w18, layers: [18], submodule: residual.post}
  - {write: steering_vector, name: steer, vector: v, scale: 1.5, layers: [22],
     submodule: attention.post, when: token_in(trigger_list), gate: gate18 >= 0}
"""
TENSORS = {"w18": V, "v": V.half()}


def folder_of(path, text=YAML, tensors=TENSORS):
    path.mkdir(exist_ok=True)
    (path / "app.yaml").write_text(text)
    save_file(tensors, path / "tensors.safetensors")
    return path


def zipped(files, **attributes):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            for key, value in attributes.get(name.rpartition("/")[2], {}).items():
                setattr(entry, key, value)
            archive.writestr(entry, content)
    return data.getvalue()


GOOD_ZIP = [("app.yaml", YAML), ("tensors.safetensors", save(TENSORS))]


def test_yaml_and_builder_are_the_same(tmp_path):
    folder = folder_of(tmp_path / "guarded")
    assert m.load_app(folder) == guarded()
    assert m.load_app(str(folder / "app.yaml")) == guarded()


def test_the_examples_of_the_page_are_the_same(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "apps.md").read_text()
    python, text = (
        page.partition(f"```{language}\n")[2].partition("```")[0]
        for language in ("python", "yaml")
    )
    monkeypatch.chdir(tmp_path)
    found = {"t1": V, "t2": V.half()}
    exec(python, found)
    (tmp_path / "guarded" / "app.yaml").write_text(text)
    assert m.load_app("guarded/") == found["app"] == guarded()


def test_a_saved_app_comes_back(tmp_path):
    guarded().save(tmp_path / "deep" / "guarded")
    assert m.load_app(tmp_path / "deep" / "guarded") == guarded()
    assert sorted(p.name for p in (tmp_path / "deep" / "guarded").iterdir()) == [
        "app.yaml",
        "tensors.safetensors",
    ]


def test_an_app_without_tensors_is_one_file(tmp_path):
    made = m.App("norms", [m.read("norm").layers("all")])
    made.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["app.yaml"]
    assert m.load_app(tmp_path) == made


def test_a_saved_app_is_plain_yaml_to_any_reader(tmp_path):
    guarded().save(tmp_path)
    value = yaml.safe_load((tmp_path / "app.yaml").read_text())
    assert value["functions"] == list(guarded().functions)


def test_a_zip_and_a_json_text_hold_the_same_app(tmp_path):
    data = json.dumps(guarded().to_dict()).encode()
    assert app_from_bytes(data) == guarded()
    assert app_from_bytes(zipped(GOOD_ZIP)) == guarded()
    inside = [(f"a/b/{name}", content) for name, content in GOOD_ZIP]
    assert app_from_bytes(zipped([*inside, ("README.md", "hi")])) == guarded()
    (tmp_path / "app.zip").write_bytes(zipped(GOOD_ZIP))
    (tmp_path / "app.json").write_bytes(data)
    assert m.load_app(tmp_path / "app.zip") == m.load_app(tmp_path / "app.json")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8"))
        | st.sampled_from(
            ["1e3", "off", "1:30", "2024-01-01", "~", "0x10", ".5", "<<"]
        ),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(st.characters(codec="utf-8")), inner)
        ),
    )
)
def test_yaml_there_and_back(value):
    found = {"value": value}
    if "'<<'" not in repr(value):
        assert load_yaml(dump_yaml(found).encode(), "app.yaml") == found


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n"
    for i in range(9)
)
MERGES = "a: &a {x: 1}\nb: {<<: *a}\n"
TEXTS = {
    "empty": "",
    "comment": "# nothing",
    "two": "name: a\n---\nname: b\n",
    "list": "- name",
    "scalar": "3",
    "tab": "name:\n\t- a",
    "python": "!!python/object/apply:os.system ['true']",
    "tag": "name: !!str guarded",
    "own tag": "name: !x guarded",
    "bomb": BOMB,
    "cycle": "a: &a [*a]",
    "alias": "a: *missing",
    "merge": MERGES,
    "twice": "name: a\nname: b",
    "key list": "? [a]\n: 1",
    "key number": "1: 2",
    "deep": "[" * 100_000,
    "deep block": "- " * 20_000,
    "long": "name: " + "x" * 2**20,
    "number": "name: " + "9" * 100_000,
    "sexagesimal": "name: 1" + ":59" * 300_000,
    "nan": "name: .nan",
    "infinite": "name: -.inf",
    "huge": "scale: 1e999",
    "escape": 'name: "\\UFFFFFFFF"',
    "directive": "%YAML 99999999999999999999.1\n---\na: 1",
    "control": "name: \x00",
    "values": "name: [" + "1," * 200_000 + "]",
    "no functions": "name: a",
    "unknown key": YAML + "function: []\n",
    "name": YAML.replace("name: guarded", "name: off"),
    "functions": "name: a\nfunctions: {}",
    "function": "name: a\nfunctions: [3]",
    "token sets": "name: a\nfunctions: [{read: norm, layers: 0}]\ntoken_sets: [1]",
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_yaml_is_refused_soon(name, tmp_path):
    folder = folder_of(tmp_path / "app", TEXTS[name])
    start = time.process_time()
    with pytest.raises(m.SpecError):
        m.load_app(folder)
    assert time.process_time() - start < 10


PARSERS = {"PyYAML": yaml.SafeLoader, "libyaml": app_yaml._FAST_LOADER}
REFUSED = {
    "name: a\nname: b": "the key 'name' is given twice",
    "a: {b: [{c: 1, c: 2}]}": "the key 'c' is given twice",
    "name: !!str guarded": "the tag tag:yaml.org,2002:str: tags are not read",
    "name: !x guarded": "the tag !x: tags are not read",
    "a: *missing": "the alias missing names nothing",
    MERGES: "merge keys (<<) are not read",
    "1: 2": "a key of type int is not a string",
    "name: a\n---\nname: b": "it has more than one document",
    "# nothing": "it is empty",
    "[" * 40: "it has more than 100000 values or 32 levels",
    "name: a\nscale: 1\nx: @": "that cannot start any token in line 3",
    "name: a\nx: [1\ny: 2": "in line 3",
}
PADDING = "# padding\n" * 7000


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", REFUSED)
def test_either_parser_gives_place_and_key(parser, text, monkeypatch):
    monkeypatch.setattr(app_yaml, "_loader", lambda num_bytes: PARSERS[parser])
    with pytest.raises(m.SpecError) as refusal:
        load_yaml(text.encode(), "app.yaml")
    assert str(refusal.value).startswith("app.yaml 'YAML' refused.")
    assert REFUSED[text] in str(refusal.value)


@pytest.mark.parametrize("parser", PARSERS)
def test_either_parser_reads_the_core_schema(parser, monkeypatch):
    monkeypatch.setattr(app_yaml, "_loader", lambda num_bytes: PARSERS[parser])
    text = """\
a: &a [1, -2.5e1, .5, true, ~, off, "1", '~', 1:30, 2024-01-01, é😀]
b: {c: *a, "d\\n": x}
e: >-
  folded
  text
"""
    a = [1, -25.0, 0.5, True, None, "off", "1", "~", "1:30", "2024-01-01", "é😀"]
    wanted = {"a": a, "b": {"c": a, "d\n": "x"}, "e": "folded text"}
    assert load_yaml(text.encode(), "app.yaml") == wanted


def test_large_texts_go_to_the_fast_parser(monkeypatch):
    used = []
    parse = yaml.parse
    monkeypatch.setattr(
        app_yaml.yaml, "parse", lambda text, Loader: used.append(Loader) or parse(text)
    )
    for text in (YAML, PADDING + YAML):
        assert load_yaml(text.encode(), "app.yaml")["name"] == "guarded"
    assert used == [yaml.SafeLoader, app_yaml._FAST_LOADER]


def test_refusals_of_large_texts_name_key_and_line():
    for more, why in {"name: b": "'name' is given twice", "x: @": "line 7008"}.items():
        with pytest.raises(m.SpecError, match=why):
            load_yaml((PADDING + YAML + more).encode(), "app.yaml")


PATHS = {
    "absolute": "/etc/passwd",
    "up": "../tensors.safetensors",
    "inner up": "a/../../tensors.safetensors",
    "backslash": "a\\\\b.safetensors",
    "drive": "c:x.safetensors",
    "suffix": "tensors.pt",
    "missing": "other.safetensors",
    "number": "3",
    "null byte": '"a\\0.safetensors"',
    "link": "link.safetensors",
    "folder link": "up/tensors.safetensors",
    "folder": "folder.safetensors",
    "fifo": "fifo.safetensors",
    "loop": "loop.safetensors",
    "long": "a" * 5000 + ".safetensors",
}


@pytest.mark.parametrize("name", PATHS)
def test_tensors_lie_in_the_folder(name, tmp_path):
    save_file(TENSORS, tmp_path / "tensors.safetensors")
    text = YAML.replace("tensors.safetensors", PATHS[name])
    folder = folder_of(tmp_path / "app", text)
    (folder / "link.safetensors").symlink_to(tmp_path / "tensors.safetensors")
    (folder / "up").symlink_to(tmp_path)
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "loop.safetensors").symlink_to(folder / "loop.safetensors")
    with pytest.raises(m.SpecError):
        m.load_app(folder)


def header(value, data=b""):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changes):
    item = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return header({"v": item}, bytes(8))


STORED = {
    "empty": b"",
    "short": b"\x01",
    "cut": struct.pack("<Q", 2**63) + b"{}",
    "long header": struct.pack("<Q", 2**21) + b" " * 2**21,
    "not json": header(b"{nope"),
    "deep": header(b"[" * 100_000),
    "list": header([1]),
    "item": header({"v": 3}),
    "twice": header(b'{"v": {}, "v": {}}'),
    "pickle": pickle.dumps({"v": [1.0]}),
    "dtype": one(dtype="I64"),
    "dtype list": one(dtype=["F32"]),
    "shape": one(shape=[3]),
    "huge": one(shape=[2**39, 2**39]),
    "huge and fitting": one(shape=[2**31], data_offsets=[0, 2**33]),
    "negative": one(shape=[-2]),
    "bool": one(shape=[True, 2]),
    "axes": one(shape=[1, 1, 1, 2]),
    "none": one(shape=[0], data_offsets=[0, 0]),
    "offsets": one(data_offsets=[8, 16]),
    "backwards": one(data_offsets=[8, 0]),
    "floats": one(data_offsets=[0.0, 8.0]),
    "nan": header(
        {"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        struct.pack("<f", float("nan")),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_hostile_tensors_are_refused(name, tmp_path):
    text = "name: a\ntensors: t.safetensors\n"
    text += "functions: [{write: ablate, vector: v, layers: 0}]"
    folder = folder_of(tmp_path / "app", text)
    (folder / "t.safetensors").write_bytes(STORED[name])
    with pytest.raises(m.SpecError):
        m.load_app(folder)


def test_a_file_over_the_limit_is_not_read(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "app")
    with (folder / "tensors.safetensors").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(m.SpecError, match="more than"):
        m.load_app(folder)
    with pytest.raises(m.SpecError, match="cannot be read"):
        m.load_app(tmp_path / "nothing")


def changed(edit):
    value = copy.deepcopy(guarded().to_dict())
    edit(value)
    return value


TEXT64 = base64.b64encode(bytes(32)).decode()
DICTS = {
    "tensors": lambda v: v.update(tensors=[1]),
    "tensor": lambda v: v["tensors"].update(v=3),
    "dtype": lambda v: v["tensors"]["v"].update(dtype="int8"),
    "dtype list": lambda v: v["tensors"]["v"].update(dtype=["float32"]),
    "shape": lambda v: v["tensors"]["v"].update(shape=[9]),
    "huge": lambda v: v["tensors"]["v"].update(shape=[2**39, 2**39]),
    "negative": lambda v: v["tensors"]["v"].update(shape=[-1, -8]),
    "text": lambda v: v["tensors"]["v"].update(shape="8"),
    "key": lambda v: v["tensors"]["v"].update(more=1),
    "base64": lambda v: v["tensors"]["v"].update(data="*" * 24),
    "unicode": lambda v: v["tensors"]["v"].update(data="é" * 24),
    "short": lambda v: v["tensors"]["v"].update(data=TEXT64[:4]),
    "padding": lambda v: v["tensors"]["v"].update(data="=" * 24),
    "file": lambda v: v.update(tensors="tensors.safetensors"),
    "name": lambda v: v["tensors"].update({"a/b": v["tensors"]["v"]}),
}


@pytest.mark.parametrize("name", DICTS)
def test_hostile_json_is_refused(name):
    with pytest.raises(m.SpecError):
        m.App.from_dict(changed(DICTS[name]))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**6, b'{"a":1,"a":2}', b"9" * 10_000],
)
def test_what_is_not_json_is_refused(data):
    with pytest.raises(m.SpecError):
        app_from_bytes(data)


LINK = {"external_attr": (stat.S_IFLNK | 0o777) << 16, "create_system": 3}
ZIPS = {
    "empty": lambda: zipped([]),
    "cut": lambda: zipped(GOOD_ZIP)[:-30],
    "garbage": lambda: b"PK\x03\x04" + b"garbage" * 20,
    "no app": lambda: zipped(GOOD_ZIP[1:]),
    "two apps": lambda: zipped([*GOOD_ZIP, ("b/app.yaml", YAML)]),
    "no tensors": lambda: zipped(GOOD_ZIP[:1]),
    "slip": lambda: zipped([*GOOD_ZIP, ("../../evil", "x")]),
    "absolute": lambda: zipped([*GOOD_ZIP, ("/evil", "x")]),
    "backslash": lambda: zipped([*GOOD_ZIP, ("..\\evil", "x")]),
    "drive": lambda: zipped([*GOOD_ZIP, ("c:evil", "x")]),
    "link": lambda: zipped(GOOD_ZIP, **{"tensors.safetensors": LINK}),
    "many": lambda: zipped([*GOOD_ZIP, *((f"f{i}", "") for i in range(64))]),
    "up": lambda: zipped(
        [("a/app.yaml", YAML.replace("tensors.s", "../tensors.s")), *GOOD_ZIP[1:]]
    ),
    "long yaml": lambda: zipped([("app.yaml", YAML + " " * 2**20), *GOOD_ZIP[1:]]),
    "damaged": lambda: zipped(GOOD_ZIP)[:60] + b"damage" + zipped(GOOD_ZIP)[66:],
    "odd method": lambda: zipped(GOOD_ZIP).replace(b"\x08\x00", b"\x63\x00"),
}


@pytest.mark.parametrize("name", ZIPS)
def test_hostile_zips_are_refused(name):
    with pytest.raises(m.SpecError):
        app_from_zip(ZIPS[name]())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_in_a_zip_is_refused():
    with pytest.raises(m.SpecError, match="twice"):
        app_from_zip(zipped([*GOOD_ZIP, *GOOD_ZIP[1:]]))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(app_files, "MAX_FILE_BYTES", 2**20)
    bomb = zipped([*GOOD_ZIP, ("zeros", bytes(2**21))])
    assert len(bomb) < 2**14
    with pytest.raises(m.SpecError, match="unpacked"):
        app_from_zip(bomb)


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=8))
def test_a_damaged_zip_is_an_app_or_refused(place, noise):
    data = bytearray(zipped(GOOD_ZIP))
    place %= len(data)
    data[place : place + len(noise)] = noise
    with contextlib.suppress(m.SpecError):
        app_from_zip(bytes(data))


@given(st.integers(0, 300), st.binary(min_size=1, max_size=8))
def test_damaged_tensors_are_read_or_refused(place, noise):
    data = bytearray(save(TENSORS))
    place %= len(data)
    data[place : place + len(noise)] = noise
    with contextlib.suppress(m.SpecError):
        read_safetensors(bytes(data), "tensors")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_bytes_are_plain_yaml_or_refused(data):
    try:
        value = load_yaml(data, "app.yaml")
    except m.SpecError:
        return
    assert plain(value, "") == value


class Tokenizer:
    """Byte-level pieces: what `decode` gives is not what a piece looks like."""

    texts = ("a", ".\n\n", "\n\n", "\n", "\ufffd\n\n", "\n\nb", "b")

    def decode(self, ids, skip_special_tokens):
        return self.texts[ids[0]]

    def convert_ids_to_tokens(self, ids):
        return [("\u2581b" if i == 6 else "x") for i in ids]


def test_token_sets_by_what_tokens_decode_to():
    def resolve(value, size=9):
        return token_sets.resolve_all({"set": value}, Tokenizer(), size)["set"]

    assert resolve({"decoded_endswith": "\n\n"}) == (1, 2, 4)
    assert resolve({"decoded_contains": "\n\n"}) == (1, 2, 4, 5)
    # SentencePiece drops the space that begins a word when it decodes one token.
    assert resolve({"decoded_contains": " b"}) == (6,)
    assert resolve([5, 1, 5]) == (1, 5)
    for refused in ([9], {"decoded_endswith": "zzz"}, [], "x", {"a": "b"}):
        with pytest.raises(m.SpecError):
            resolve(refused)


def test_the_vocabulary_is_decoded_once(monkeypatch):
    calls = []

    def decode(self, ids, skip_special_tokens):
        calls.append(ids)
        return self.texts[ids[0]]

    monkeypatch.setattr(Tokenizer, "decode", decode)
    found = token_sets.resolve_all(
        {"a": {"decoded_endswith": "a"}, "b": {"decoded_endswith": "b"}, "c": [3]},
        Tokenizer(),
        7,
    )
    assert found == {"a": (0,), "b": (5, 6), "c": (3,)}
    assert len(calls) == 7


def test_tensors_of_every_dtype_come_back(tmp_path):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        made = m.App("a", [m.write("ablate", vector=V.to(dtype)).layers("all")])
        made.save(tmp_path)
        found = m.load_app(tmp_path)
        assert found == made == app_from_bytes(json.dumps(made.to_dict()).encode())
        assert found.tensors["write0.vector"].dtype == dtype
