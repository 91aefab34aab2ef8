"""Two engines on one GPU with the same weights and KV cache, byte for byte.

Where a tensor lies decides how fast a kernel reads it. Two starts of vanilla vLLM on an
H200 differ by up to 1% of a step, in GEMMs and attention that have the same binaries and
sizes; what eyesplice costs is less. An engine that borrows maps the lender's weights and
cache (CUDA IPC) instead of its own, so that a pair differs in what is compared only. It
allocates none of what is large, so a model needs room once: it loads into the lender's
memory, by the same loader the same values.
"""

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eyesplice.benchmarks.lending import FOLDER, ROLE

_LARGE: Final = 1 << 20
_DEVICES: Final = ("cuda",)
_WAIT: Final = 600.0


class Memory:
    """This process's side."""

    def __init__(self, folder: Path, *, lends: bool, rank: int) -> None:
        """The side of one rank.

        Args:
            folder: where the two meet.
            lends: whether this is the lender.
            rank: of the worker.
        """
        self._folder = folder
        self._lends = lends
        self._rank = rank
        self._lent: list[Tensor] = []
        self._made: list[tuple[int, int]] = []
        self._theirs: dict[str, Tensor] | None = None
        self.num_bytes = 0
        self.failed: str | None = None

    @classmethod
    def of_environment(cls, rank: int) -> "Memory":
        """As `lending.variables` say."""
        folder, role = os.environ[FOLDER], os.environ[ROLE]
        return cls(Path(folder), lends=role == "lend", rank=rank)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, the large tensors that a borrower allocates for weights are lent.

        The lender notes the order in which it allocates; the borrower, whose loader
        allocates in the same order, waits until all of the lender's are loaded.
        """
        order: Iterator[str | None] | None = None

        def empty(*size: Any, **options: Any) -> Tensor:
            nonlocal order
            plan = _planned(size, options)
            if plan is None or plan.nbytes < _LARGE:
                return torch.empty(*size, **options)
            if self._lends:
                made = torch.empty(*size, **options)
                self._made.append((made.data_ptr(), made.nbytes))
                return made
            if order is None:
                order = self._order()
            theirs = self._lenders().get(next(order, None) or "")
            if theirs is None or not _laid_out_alike(plan, theirs):
                return torch.empty(*size, **options)
            return theirs.detach()

        with _Instead(torch.empty, empty):
            yield

    def _order(self) -> Iterator[str | None]:
        """Names of the lender's weights as they were allocated; None for other tensors."""
        # A lender writes the order before it lends the weights.
        if not self._lenders():
            return iter(())
        names: list[str | None] = json.loads(self._file("order").read_text())
        return iter(names)

    def _lenders(self) -> dict[str, Tensor]:
        """The lender's weights by name, mapped once; none where that may not be."""
        if self._theirs is None:
            try:
                self._theirs = dict(self._borrowed("weights"))
            except RuntimeError as error:
                self.failed = str(error)
                self._theirs = {}
        return self._theirs

    def _note_order(self, own: Mapping[str, Tensor]) -> None:
        names = {
            (tensor.data_ptr(), tensor.nbytes): name for name, tensor in own.items()
        }
        # An address that was let go and given out again is the last one's.
        found = [names.pop(place, None) for place in reversed(self._made)]
        self._file("order").write_text(json.dumps(found[::-1]))

    def weights(self, model: nn.Module) -> None:
        """Lend the model's parameters and buffers, or take the lender's.

        Where a process may not map another's memory, `failed` says so and each keeps its
        own.

        Raises:
            ValueError: another name, layout or value than the lender's.
        """
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own = {name: t.data for name, t in found.items() if _on_gpu(t)}
        if self._lends:
            self._note_order(own)
            self._lend("weights", list(own.items()))
            return
        theirs = self._lenders()
        if self.failed is not None:
            return
        if theirs.keys() != own.keys():
            raise ValueError(f"other weights: {sorted(theirs.keys() ^ own.keys())}")
        for name, tensor in own.items():
            if not _alike(tensor, theirs[name]):
                raise ValueError(f"the weight {name} is not the lender's")
        for name in own:
            found[name].data = theirs[name]
        self.num_bytes += sum(tensor.nbytes for tensor in theirs.values())
        own.clear()
        torch.cuda.empty_cache()

    @contextmanager
    def cache(self) -> Iterator[None]:
        """Inside, the large tensors of bytes that the engine allocates are shared."""
        made: list[tuple[str, Tensor]] = []
        borrows = not self._lends and self.failed is None
        theirs = iter(self._borrowed("cache")) if borrows else None

        def zeros(*size: Any, **options: Any) -> Tensor:
            wanted = options.get("dtype") is torch.int8 and _count(size) >= _LARGE
            if not wanted:
                return torch.zeros(*size, **options)
            if theirs is None:
                made.append(("", torch.zeros(*size, **options)))
                return made[-1][1]
            tensor = next(theirs)[1]
            if tensor.numel() != _count(size):
                raise ValueError(f"a cache of {_count(size)} bytes, {tensor.numel()}")
            self.num_bytes += tensor.nbytes
            return tensor.view(torch.Size(size[0]) if _listed(size) else size)

        with _Instead(torch.zeros, zeros):
            yield
        if self._lends:
            self._lend("cache", made)

    def _file(self, what: str) -> Path:
        return self._folder / f"{what}-{self._rank}"

    def _lend(self, what: str, tensors: list[tuple[str, Tensor]]) -> None:
        # The lender's blocks must stay as long as anyone may read them.
        self._lent += [tensor for _, tensor in tensors]
        handles = [(name, handle(tensor)) for name, tensor in tensors]
        part = self._file(what).with_suffix(".part")
        part.write_bytes(bytes(ForkingPickler.dumps(handles)))
        part.rename(self._file(what))

    def _borrowed(self, what: str) -> list[tuple[str, Tensor]]:
        end = time.monotonic() + _WAIT
        while not self._file(what).exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody lent {what}")
            time.sleep(0.1)
        # Of the pair's own making, in a folder that this benchmark made for it.
        handles = pickle.loads(self._file(what).read_bytes())
        return [(name, rebuild(*arguments)) for name, (rebuild, arguments) in handles]

    def note(self) -> None:
        """Leave for the parent what was borrowed."""
        if not self._lends:
            found = {"bytes": self.num_bytes, "failed": self.failed}
            self._file("borrowed").write_text(json.dumps(found))


class _Instead(TorchFunctionMode):
    """Inside, one function of torch is called as another; in that one it is itself.

    torch remembers its functions that make tensors as it finds them at first, so they
    may not be replaced in its module: `with torch.device(...)` would go past them.
    """

    def __init__(self, function: Any, other: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._other = other

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The other's result for the function, and what it gives itself for any other."""
        called = self._other if func is self._function else func
        return called(*args, **(kwargs or {}))


def handle(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What another process makes the same tensor of."""
    from torch.multiprocessing.reductions import reduce_tensor

    found: tuple[Callable[..., Tensor], tuple[Any, ...]] = reduce_tensor(tensor)
    return found


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _planned(size: Any, options: Mapping[str, Any]) -> Tensor | None:
    """The tensor that would be made, without memory; None for one off the GPU."""
    device = torch.device(options.get("device") or torch.get_default_device())
    if device.type not in _DEVICES or "out" in options:
        return None
    return torch.empty(*size, **{**options, "device": "meta", "pin_memory": False})


def _alike(one: Tensor, other: Tensor) -> bool:
    return _laid_out_alike(one, other) and _equal_bits(one, other)


def _laid_out_alike(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride()
    return same and one.dtype == other.dtype


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    if one.data_ptr() == other.data_ptr():
        return True
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = bits.get(one.element_size())
    if kind is None or one.dtype.is_complex:
        return torch.equal(one, other)
    return torch.equal(one.view(kind), other.view(kind))


def _listed(size: tuple[Any, ...]) -> bool:
    return len(size) == 1 and not isinstance(size[0], int)


def _count(size: tuple[Any, ...]) -> int:
    """Elements of `torch.zeros(*size)`."""
    return torch.Size(size[0] if _listed(size) else size).numel()
