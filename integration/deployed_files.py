"""What the files of a configuration hold, so that a process reads them into tables once.

The configuration is met up to three times in a process: when it is validated, by the
front end, and by a worker that lives there too. Modification times say too little: a
folder may be copied over, and a file be replaced within a tick of the clock.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from eyesplice.integration.config import EyespliceConfig

_MAX_FILES: Final = 1000
_MAX_BYTES: Final = 2**33
_WEIGHTS: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt"),
    *(".gguf", ".h5", ".msgpack", ".npz", ".onnx"),
)
"""What no tokenizer is made of. Vocabularies have many suffixes, and code of their own."""
_VECTOR_FILES: Final = (".safetensors", ".pt")

T = TypeVar("T")


class Latest(Generic[T]):
    """The value made last; another key makes another and forgets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: tuple[str, T] | None = None

    def get(self, key: str | None, make: Callable[[], T]) -> T:
        """The value of a key; without one it is made, and not kept.

        Whoever takes it shares it: it must not be edited.
        """
        if key is None:
            return make()
        with self._lock:
            if self._made is None or self._made[0] != key:
                self._made = key, make()
            return self._made[1]


def content_key(config: EyespliceConfig, shape: object, model: Any) -> str | None:
    """A hash of all that a deployment is made from, by content.

    Args:
        config: the user's configuration; its salt does not count.
        shape: sizes of the model.
        model: vLLM's `ModelConfig`, of which the dtype and the tokenizer count.

    Returns:
        None where there is something that cannot be read, or too many files.
    """
    names = ("tokenizer", "tokenizer_revision", "trust_remote_code")
    tokenizer = [getattr(model, name, None) for name in names]
    settings = (model.dtype, model.skip_tokenizer_init, tokenizer)
    text = config.model_dump_json(exclude={"salt"})
    found = hashlib.sha256(repr((text, shape, settings)).encode())
    try:
        for file in _bounded(_files(config, tokenizer[0]), _MAX_FILES):
            found.update(f"\n{str(file)!r} {_content(file)}".encode())
    except (OSError, ValueError, OverflowError):
        return None
    return found.hexdigest()


def _content(file: Path) -> str:
    """A hash of a file; for a link to a folder, whose files are listed, the folder."""
    if file.is_dir():
        return repr(str(file.resolve()))
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _bounded(files: Iterable[Path], limit: int) -> list[Path]:
    """The files, if they are not more than the limit."""
    found = list(islice(files, limit + 1))
    if len(found) > limit or sum(file.stat().st_size for file in found) > _MAX_BYTES:
        raise OverflowError
    return found


def _files(config: EyespliceConfig, tokenizer: object) -> Iterator[Path]:
    for path in config.app_paths:
        given = Path(path).expanduser()
        packed = given.suffix.lower() in (".zip", ".json") and given.is_file()
        yield from [given] if packed else _inside(given, "**/*")
    if config.vectors is not None:
        yield from _inside(Path(config.vectors).expanduser(), "*", _VECTOR_FILES)
    if isinstance(tokenizer, str) and Path(tokenizer).is_dir():
        beside = _inside(Path(tokenizer), "*")
        yield from (file for file in beside if file.suffix.lower() not in _WEIGHTS)


def _inside(path: Path, pattern: str, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Files and links of a folder, or of the folder that a file is in."""
    folder = path if path.is_dir() else path.parent
    return sorted(
        file
        for file in _bounded(folder.glob(pattern), 10 * _MAX_FILES)
        if (file.is_file() or file.is_symlink())
        and (not suffixes or file.suffix.lower() in suffixes)
    )
