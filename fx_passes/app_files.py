"""Apps in files: a folder, a zip of one, or one JSON text.

A folder holds `app.yaml` and the safetensors file that its key `tensors` names. Sizes
are checked before anything is read, and nothing that a file says can run.
"""

import io
import json
import math
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn

import safetensors.torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.app_tensors import DTYPES, MAX_TENSOR_BYTES, is_shape
from eyesplice.fx_passes.app_yaml import MAX_YAML_BYTES, dump_yaml, load_yaml
from eyesplice.fx_passes.apps import App, AppModel
from eyesplice.fx_passes.models import validate
from eyesplice.fx_passes.plain import no_repeats

APP_FILE: Final = "app.yaml"
TENSOR_FILE: Final = "tensors.safetensors"
MAX_HEADER_BYTES: Final = 2**20
MAX_FILE_BYTES: Final = 8 + MAX_HEADER_BYTES + MAX_TENSOR_BYTES
MAX_ZIP_FILES: Final = 64

_DTYPE_CODES: Final = dict(
    zip(("F16", "BF16", "F32", "F64"), DTYPES.values(), strict=True)
)

Reader = Callable[[PurePosixPath], bytes]
"""The bytes of a file, by its path relative to the folder."""


def load_app(path: str | Path) -> App:
    """The app that a folder, or the `app.yaml` in one, states.

    Args:
        path: a folder, its YAML file, a `.zip` of a folder, or a `.json` app.

    Raises:
        SpecError: no such file, or anything in it that is not an app.
    """
    given = Path(path).expanduser()
    if given.suffix.lower() in (".zip", ".json") and given.is_file():
        return app_from_bytes(_read(given, MAX_FILE_BYTES))
    file = given / APP_FILE if given.is_dir() else given
    folder = file.parent
    text = _read(file, MAX_YAML_BYTES)

    def read(name: PurePosixPath) -> bytes:
        target = folder / name
        try:
            inside = target.resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError):
            inside = False
        if not inside:
            _refuse_file("tensors", str(name), "it leads out of the app's folder")
        return _read(target, MAX_FILE_BYTES)

    return _app(text, read)


def app_from_bytes(data: bytes) -> App:
    """The app in a zip of its folder, or in a JSON text with base64 tensors.

    Raises:
        SpecError: neither, or not an app.
    """
    return app_from_zip(data) if data[:2] == b"PK" else app_from_json(data)


def app_from_json(data: bytes) -> App:
    """The app that a JSON text states; see `App.to_dict`.

    Raises:
        SpecError: not such a text.
    """
    try:
        value = json.loads(data, object_pairs_hook=no_repeats)
    except (ValueError, RecursionError, MemoryError) as error:
        _refuse_file("app", "JSON", str(error) or type(error).__name__)
    return App.from_dict(value)


def app_from_zip(data: bytes) -> App:
    """The app in a zip of its folder, read in memory and never unpacked.

    Raises:
        SpecError: not a zip of one app's folder, too large, too many files, or a file
            that is a link, is encrypted, or would lie outside the folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _from_archive(archive)
    except SpecError:
        raise
    # zipfile gives malformed archives away by many kinds of error.
    except Exception as error:
        _refuse_file("app", "zip", str(error) or type(error).__name__)


def save(app: App, folder: Path) -> None:
    """Write an app's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    outline = app.outline()
    if app.tensors:
        safetensors.torch.save_file(dict(app.tensors), folder / TENSOR_FILE)
        outline = {"name": app.name, "tensors": TENSOR_FILE} | outline
    (folder / APP_FILE).write_text(dump_yaml(outline), encoding="utf-8")


def _app(text: bytes, read: Reader) -> App:
    """The app of a YAML text whose tensors lie where `read` finds them."""
    model = validate(AppModel, load_yaml(text, APP_FILE), APP_FILE)
    tensors = {}
    if model.tensors is not None:
        tensors = read_safetensors(read(_tensor_path(model.tensors)), "tensors")
    return App(model.name, model.functions, tensors, model.token_sets)


def _tensor_path(value: Any) -> PurePosixPath:
    if isinstance(value, str) and value.isprintable() and len(value) <= 256:
        path = PurePosixPath(value)
        plain = not path.is_absolute() and ".." not in path.parts
        if plain and path.suffix == ".safetensors" and not set(value) & set("\\:"):
            return path
    raise SpecError(
        "tensors",
        value,
        "the relative path of a .safetensors file in the app's folder",
        "put the tensors beside app.yaml and name them so",
    )


def read_safetensors(data: bytes, path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose header holds together.

    Args:
        data: the whole file.
        path: what the error names.

    Raises:
        SpecError: malformed, or a dtype or size that an app cannot have.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER_BYTES, len(data) - 8):
        _refuse_file(path, f"{len(data)} bytes", "its header is cut off or too large")
    try:
        header = json.loads(data[8 : 8 + size], object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:
        _refuse_file(path, "safetensors", f"its header is not JSON: {error}")
    if not isinstance(header, dict):
        _refuse_file(path, "safetensors", "its header is not an object")
    for name, item in header.items():
        if name != "__metadata__" and not _holds_together(item):
            _refuse_file(f"{path}.{name[:80]}", item, "not a dense float tensor")
    try:
        return safetensors.torch.load(data)
    # What is left to the library differs with its version.
    except Exception as error:
        _refuse_file(path, "safetensors", str(error) or type(error).__name__)


def _holds_together(item: Any) -> bool:
    """Whether a header's tensor has a known dtype and as many bytes as it needs."""
    match item:
        case {"dtype": str(code), "shape": shape, "data_offsets": [first, last]} if (
            code in _DTYPE_CODES and is_shape(shape)
        ):
            size = math.prod(shape) * _DTYPE_CODES[code].itemsize
            whole = type(first) is int and type(last) is int
            return whole and last - first == size <= MAX_TENSOR_BYTES
    return False


def _from_archive(archive: zipfile.ZipFile) -> App:
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > MAX_ZIP_FILES:
        _refuse_file("app", f"{len(entries)} files", f"more than {MAX_ZIP_FILES} files")
    total = sum(entry.file_size for entry in entries)
    if total > MAX_FILE_BYTES:
        _refuse_file(
            "app", f"{total} bytes", f"more than {MAX_FILE_BYTES} bytes unpacked"
        )
    files: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for entry in entries:
        path = _entry_path(entry)
        if path in files:
            _refuse_file("app", entry.filename, "the zip holds it twice")
        files[path] = entry
    roots = [path.parent for path in files if path.name == APP_FILE]
    if len(roots) != 1:
        _refuse_file("app", f"{len(roots)} files {APP_FILE}", "a zip holds one app")

    def read(name: PurePosixPath, limit: int = MAX_FILE_BYTES) -> bytes:
        entry = files.get(roots[0] / name)
        if entry is None:
            _refuse_file("tensors", str(name), "the zip does not hold it")
        if entry.file_size > limit:
            _refuse_file(str(name), f"{entry.file_size} bytes", f"over {limit} bytes")
        return archive.read(entry)

    return _app(read(PurePosixPath(APP_FILE), MAX_YAML_BYTES), read)


def _entry_path(entry: zipfile.ZipInfo) -> PurePosixPath:
    name = entry.filename
    path = PurePosixPath(name)
    mode = entry.external_attr >> 16
    if path.is_absolute() or ".." in path.parts or set(name) & set("\\:\0"):
        _refuse_file("app", name, "it would lie outside the folder")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        _refuse_file("app", name, "it is not a regular file")
    if entry.flag_bits & 1:
        _refuse_file("app", name, "it is encrypted")
    return path


def _read(file: Path, limit: int) -> bytes:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            _refuse_file("app", file.name, "it is not a regular file")
        if status.st_size > limit:
            _refuse_file("app", file.name, f"it has more than {limit} bytes")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        _refuse_file("app", str(file), f"it cannot be read: {error}")


def _refuse_file(path: str, value: object, why: str) -> NoReturn:
    raise SpecError(
        path,
        value,
        f"a folder with {APP_FILE} and a .safetensors file, a zip of one, or a JSON app",
        f"correct it: {why}",
    )
