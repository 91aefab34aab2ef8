"""The shape of a model, from its `config.json`: no weights are needed to time it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_EXPERTS: Final = ("num_local_experts", "num_experts")
_POSITIONS: Final = 2048
_TOKENIZER: Final = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model.

    Attributes:
        hidden: elements of the residual stream.
        layers: decoder layers.
        experts: of a mixture layer, 0 for a dense model.
        vocab: token ids are 0 to vocab - 1.
        positions: the longest sequence that the model is made for.
    """

    hidden: int
    layers: int
    experts: int
    vocab: int
    positions: int

    @classmethod
    def of(cls, model: Path) -> "Shape":
        """Read the sizes of a model's folder."""
        config = json.loads((model / "config.json").read_text())
        return cls(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            experts=max(int(config.get(key) or 0) for key in _EXPERTS),
            vocab=int(config["vocab_size"]),
            positions=int(config.get("max_position_embeddings", _POSITIONS)),
        )


def shallow_copy(model: Path, folder: Path, layers: int | None) -> Path:
    """A folder that is the model's, less decoder layers.

    Files other than `config.json` are links.

    Args:
        model: the model's folder.
        folder: of the copy, made here.
        layers: decoder layers to keep, None for all.
    """
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.absolute())
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lend_tokenizer(tokenizer: Path, folder: Path, vocab: int) -> None:
    """Give a model's folder another model's tokenizer, cut to the model's vocabulary.

    Ids that the cut removes are spelt with smaller tokens, since a merge is kept only
    if its result is.

    Args:
        tokenizer: a folder with `tokenizer.json`, a BPE of Hugging Face's.
        folder: the model's.
        vocab: token ids stay below it.
    """
    for file in tokenizer.iterdir():
        known = file.name.startswith(("tokenizer", "special_tokens", "chat_template"))
        if known and file.name != _TOKENIZER:
            _replace(folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((tokenizer / _TOKENIZER).read_text())
    model = content["model"]
    if model["type"] == "BPE" and max(model["vocab"].values()) >= vocab:
        kept = {token: i for token, i in model["vocab"].items() if i < vocab}
        model["vocab"] = kept
        model["merges"] = [
            merge
            for merge in model["merges"]
            if "".join(merge if isinstance(merge, list) else merge.split(" ")) in kept
        ]
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["id"] < vocab
        ]
    _replace(folder / _TOKENIZER).write_text(json.dumps(content))


def _replace(file: Path) -> Path:
    """A path that can be written without writing through a link."""
    file.unlink(missing_ok=True)
    return file
