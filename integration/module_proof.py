"""Puts what the finder found to the test, before a hook relies on it.

A second batch runs with every value overwritten by random numbers where its hook will
act. Then the next value must be the sum that the numbers make: a model that scales a
branch, keeps a copy of the stream or adds elsewhere fails, and none of its boundaries
is armed. A norm must be RMSNorm with the model's weight, or with the weight plus 1.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from eyesplice.fx_passes.sites import Table
from eyesplice.integration.module_finder import Decoder
from eyesplice.integration.module_hooks import on_value
from eyesplice.integration.module_places import Norm, Places
from eyesplice.ops.layout import Stage

_OFFSETS = (0.0, 1.0)


class Proof:
    """One batch with overwritten values."""

    def __init__(self, decoder: Decoder, places: Places) -> None:
        self._decoder = decoder
        self._places = places
        self._generator = torch.Generator().manual_seed(0)
        self._before: dict[tuple[Table, Stage], Tensor] = {}
        self._after: dict[tuple[Table, Stage], Tensor] = {}
        self._failed: dict[Table, str] = {}

    def run(self, rehearse: Callable[[], None]) -> None:
        """Run the batch; refuse every boundary if one of them is not what it seemed."""
        model, places = self._decoder.model, self._places
        with ExitStack() as stack:
            for (table, stage), value in places.values.items():
                if table.kind != "router":
                    act = self._overwriting(table, stage)
                    stack.callback(on_value(model, value, act).remove)
            for table, norm in places.norms.items():
                stack.callback(self._check_norm(table, norm))
            rehearse()
        for number in range(len(self._decoder.layers)):
            self._check_adds(number)
        if self._failed:
            reason = next(iter(self._failed.values()))
            for table in {*places.norms, *(t for t, _ in places.values)}:
                if table.kind in ("pre", "mid"):
                    places.refuse(table, reason)

    def _random(self, like: Tensor) -> Tensor:
        made = torch.randn(like.shape, generator=self._generator)
        return made.to(device=like.device, dtype=like.dtype)

    def _overwriting(self, table: Table, stage: Stage) -> Callable[[Tensor], None]:
        def act(value: Tensor) -> None:
            self._before[table, stage] = value.clone()
            value.copy_(self._random(value))
            self._after[table, stage] = value.clone()

        return act

    def _check_adds(self, number: int) -> None:
        """stream + branch = next stream, for both adds of a layer."""
        pre, mid = Table("pre", number), Table("mid", number)
        for first, second in ((pre, mid), (mid, Table("pre", number + 1))):
            keys = (first, Stage.STREAM), (second, Stage.BRANCH), (second, Stage.STREAM)
            if keys[2] not in self._places.values:
                continue
            stream, branch, result = (
                self._after.get(keys[0]),
                self._after.get(keys[1]),
                self._before.get(keys[2]),
            )
            if stream is None or branch is None or result is None:
                self._failed[second] = f"layer {number} has a value that was not seen"
            elif not _near(result, stream.float() + branch.float()):
                self._failed[second] = (
                    f"layer {number} does not add its block's output to the stream as "
                    "it is, or keeps the stream elsewhere"
                )

    def _check_norm(self, table: Table, norm: Norm) -> Callable[[], None]:
        """Watch a norm; the result puts its own forward back."""
        module: Any = self._decoder.model.get_submodule(norm.module)
        original, own = module.forward, module.__dict__.get("forward")

        def forward(x: Tensor, residual: Tensor | None = None) -> Any:
            if residual is None:
                y, h = original(x), x
            else:
                x.copy_(self._random(x))
                total = x.float() + residual.float()
                y, h = original(x, residual)
                if not _near(h, total):
                    self._failed[table] = f"{norm.module} does not add its two inputs"
            offset = _offset(module, h, y)
            if offset is None:
                self._failed[table] = f"{norm.module} is not an RMSNorm with a weight"
            else:
                self._places.norms[table] = Norm(
                    norm.module, offset, norm.adds, norm.width
                )
            return y if residual is None else (y, h)

        def restore() -> None:
            module.__dict__.pop("forward")
            if own is not None:
                module.forward = own

        module.forward = forward
        return restore


def _offset(module: nn.Module, h: Tensor, y: Tensor) -> float | None:
    """What a norm adds to its weight, None if y is not RMSNorm(h) with either."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if tuple(weight.shape) != tuple(h.shape[1:]):
        return None
    wide = h.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    for offset in _OFFSETS:
        if _near(y, normed * (weight.float() + offset)):
            return offset
    return None


def _near(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding to the dtype of `found`, a few times over."""
    tolerance = max(16 * torch.finfo(found.dtype).eps, 1e-4)
    scale = expected.abs() + expected.abs().mean(dim=-1, keepdim=True)
    return bool(((found.float() - expected).abs() <= tolerance * scale).all())
