"""The registry of steering vectors: read from a folder, stored as rows of the bank."""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.app_tensors import DTYPES, digest
from eyesplice.fx_passes.context import VectorInfo

_FIRST_ROW: Final = 1
"""Row 0 of the bank is all zeros."""


@dataclass(frozen=True, slots=True)
class _Stored:
    info: VectorInfo
    first_row: int
    squared_norms: tuple[float, ...]

    @property
    def rows_per_layer(self) -> int:
        """Rows at one index of the first axis."""
        return math.prod(self.info.shape[1:-1])


class VectorRegistry:
    """Tensors by name, and the bank rows they occupy.

    Every process that builds it from the same files, in the same order, gets the same
    rows. Tensors of apps are named `app/tensor`.

    Attributes:
        bank: model dtype `[used rows, width]`, on the CPU; row 0 is zero.
    """

    def __init__(self, dtype: torch.dtype, width: int, bank_rows: int) -> None:
        self._dtype = dtype
        self._bank_rows = bank_rows
        self._stored: dict[str, _Stored] = {}
        self._masks: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._frozen = False
        self.bank = torch.zeros(_FIRST_ROW, width, dtype=dtype)

    def copy(self) -> "VectorRegistry":
        """A registry of the same rows, which goes its own way from here."""
        twin = copy(self)
        twin._stored, twin._masks = dict(self._stored), dict(self._masks)
        twin.bank = self.bank.clone()
        return twin

    def names(self) -> Sequence[str]:
        """Names of every registered tensor."""
        return sorted(self._stored)

    def info(self, name: str) -> VectorInfo | None:
        """The tensor of this name, None if it is not registered."""
        stored = self._stored.get(name)
        return stored.info if stored else None

    def row(self, name: str, layer: int) -> int:
        """First bank row at index `layer` of the first axis.

        A `[width]` tensor has one row and ignores `layer`.
        """
        stored = self._stored[name]
        if stored.info.layers is None:
            return stored.first_row
        return stored.first_row + layer * stored.rows_per_layer

    def _rows_of(self, name: str) -> range:
        """Every bank row of the tensor."""
        stored = self._stored[name]
        first = stored.first_row
        return range(first, first + math.prod(stored.info.shape[:-1]))

    def rows(self, name: str, layer: int) -> tuple[int, int]:
        """First bank row and number of rows at `layer` of a tensor of several rows."""
        stored = self._stored[name]
        if len(stored.info.shape) < 3:
            return stored.first_row, len(self._rows_of(name))
        return self.row(name, layer), stored.rows_per_layer

    def squared_norm(self, name: str, layer: int) -> float:
        """|v|^2 of bank row `row(name, layer)`, of the values that the bank stores."""
        stored = self._stored[name]
        return stored.squared_norms[self.row(name, layer) - stored.first_row]

    def tensor(self, name: str) -> Tensor:
        """The values that the bank stores, of the shape of `info`, on the CPU."""
        rows, info = self._rows_of(name), self._stored[name].info
        return self.bank[rows.start : rows.stop, : info.width].reshape(info.shape)

    def mask_row(self, activate: tuple[int, ...], deactivate: tuple[int, ...]) -> int:
        """Bank row that holds 1 at experts to activate, -1 at those to deactivate.

        Until `freeze`, a mask that is not there is added to the bank.

        Raises:
            SpecError: no such row, and none can be made.
        """
        key = (tuple(sorted(activate)), tuple(sorted(deactivate)))
        if key in self._masks:
            return self._masks[key]
        if self._frozen:
            raise SpecError(
                "router mask",
                {"activate": list(key[0]), "deactivate": list(key[1])},
                f"the {len(self._masks)} masks of the deployed apps",
                "put the experts into an app and restart the engine with it",
            )
        mask = torch.zeros(1, self.bank.shape[1], dtype=self._dtype)
        mask[0, list(key[0])] = 1
        mask[0, list(key[1])] = -1
        self._masks[key] = self._append("router mask", mask)
        return self._masks[key]

    def freeze(self) -> None:
        """Take no more rows: the bank is about to be copied to the device."""
        self._frozen = True

    def add(self, name: str, tensor: Tensor) -> None:
        """Register a tensor, rounded to the bank's dtype.

        Args:
            name: what requests call it.
            tensor: any float dtype, `[width]`, `[n, width]` or `[layers, n, width]`.

        Raises:
            SpecError: not such a tensor, not finite, no room, or a name that is taken.
        """
        if name in self._stored:
            raise SpecError(
                "vectors", name, "one vector of each name", "rename one of them"
            )
        _check(name, tensor, self.bank.shape[1])
        rows = tensor.detach().to(self._dtype).reshape(-1, tensor.shape[-1])
        if not rows.isfinite().all():
            raise SpecError(
                f"vector {name}",
                f"values beyond {self._dtype}",
                f"values that {self._dtype} can hold",
                "scale the vector down",
            )
        first = self._append(f"vector {name}", rows)
        self._stored[name] = _Stored(
            VectorInfo(name, digest(tensor.detach().contiguous()), tuple(tensor.shape)),
            first,
            tuple(rows.double().square().sum(dim=-1).tolist()),
        )

    def _append(self, thing: str, rows: Tensor) -> int:
        """Add rows at the end, padded with zeros; returns the first one's number."""
        first = self.bank.shape[0]
        if first + len(rows) > self._bank_rows:
            raise SpecError(
                thing,
                f"{len(rows)} rows, with {self._bank_rows - first} free",
                f"{self._bank_rows} rows in the bank",
                "raise bank_rows in the configuration or remove vectors",
            )
        padded = torch.zeros(len(rows), self.bank.shape[1], dtype=self._dtype)
        padded[:, : rows.shape[1]] = rows
        self.bank = torch.cat([self.bank, padded])
        return first

    def load_folder(self, folder: str | None) -> None:
        """Register every vector of a folder's .safetensors and .pt files, by name.

        A file of one tensor gives a vector named like the file; a .safetensors file of
        several gives `file.key` each. A .pt file is read with `weights_only=True`, and
        its first tensor counts.

        Raises:
            SpecError: no such folder, an unreadable file, or a tensor that is refused.
        """
        if folder is None:
            return
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise SpecError(
                "vectors", folder, "an existing folder", "correct the path or create it"
            )
        for file in sorted(path.iterdir()):
            for name, tensor in _read(file):
                self.add(name, tensor)


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    suffix = file.suffix.lower()
    if suffix == ".pt":
        yield file.stem, _only_tensor(file)
    if suffix != ".safetensors":
        return
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not tensors:
        raise _unreadable(file, ValueError("it holds no tensor"))
    for key in sorted(tensors):
        yield (file.stem if len(tensors) == 1 else f"{file.stem}.{key}"), tensors[key]


def _only_tensor(file: Path) -> Tensor:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    # The unpickler gives malformed files away by whatever error they happen to cause.
    except Exception as error:
        raise _unreadable(file, error) from error
    if isinstance(loaded, dict):
        loaded = next((v for v in loaded.values() if isinstance(v, Tensor)), None)
    if not isinstance(loaded, Tensor):
        raise _unreadable(file, TypeError("it holds no tensor"))
    return loaded


def _unreadable(file: Path, error: Exception) -> SpecError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SpecError(
        "vector file",
        file.name,
        "a .safetensors file, or a .pt file that holds plain tensors",
        f"replace or remove it ({reason})",
    )


def _check(name: str, tensor: Tensor, width: int) -> None:
    if (
        tensor.layout != torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_nested
    ):
        raise SpecError(
            f"vector {name}",
            f"a {tensor.layout} tensor on {tensor.device}",
            "a dense tensor with values",
            "store it as one",
        )
    shape = list(tensor.shape)
    if (
        tensor.dtype not in DTYPES.values()
        or tensor.dim() not in (1, 2, 3)
        or 0 in shape
    ):
        raise SpecError(
            f"vector {name}",
            f"{tensor.dtype} {shape}",
            "float16, bfloat16, float32 or float64, [hidden], [layers, hidden] or "
            "[layers, rows, hidden]",
            "store the vector in that shape",
        )
    if shape[-1] > width:
        raise SpecError(
            f"vector {name}",
            shape,
            f"at most {width} elements per row in this model",
            "use a vector made for this model",
        )
    if not tensor.isfinite().all():
        raise SpecError(f"vector {name}", "NaN or Inf", "finite values", "make it anew")
