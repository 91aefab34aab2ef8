"""The seven packs as apps of a shape: random tensors of its sizes, every gate open.

The layers are the papers', scaled to the model's depth. An open gate is the dearest: the
write behind it acts on every token that it can act on. The tensors are so small that a
bf16 stream hardly changes, since what the multiplied numbers are changes the speed of
large GEMMs, and that is no cost of ours.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice.benchmarks.shapes import Shape
from eyesplice.fx_passes.apps import App
from eyesplice.integration.apps import arditi, cast, kts, orgad, sake, seal, steermoe

_PAPER_LAYERS: Final = 32
_SIZE: Final = 1e-6
_RANK: Final = 8
_OPEN_BIAS: Final = 1e3
_OPEN_DISTANCE: Final = 1e6
_TOKEN_SHARE: Final = 8
"""SEAL acts on one token id in so many where no tokenizer says what ids mean."""

_EXPERT_LAYERS: Final = 4
"""SteerMoE acts on one layer in so many."""


def seven_apps(shape: Shape, *, meaningless_ids: bool) -> dict[str, App]:
    """The packs by name; SteerMoE only for a mixture.

    Args:
        shape: of the model.
        meaningless_ids: whether generated ids mean nothing; SEAL then goes by every
            eighth id instead of those that end with a blank line.
    """
    makers: Mapping[str, Callable[[_Maker], App]] = {
        "arditi": _Maker.arditi,
        "seal": _Maker.seal,
        "cast": _Maker.cast,
        "orgad": _Maker.orgad,
        "sake": _Maker.sake,
        "kts": _Maker.kts,
        "steermoe": _Maker.steermoe,
    }
    if not shape.experts:
        makers = {name: make for name, make in makers.items() if name != "steermoe"}
    maker = _Maker(shape, meaningless_ids)
    return {name: make(maker) for name, make in makers.items()}


class _Maker:
    def __init__(self, shape: Shape, meaningless_ids: bool) -> None:
        self._shape = shape
        self._meaningless_ids = meaningless_ids
        self._generator = torch.Generator().manual_seed(0)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _vector(self) -> Tensor:
        return _SIZE * self._normal(self._shape.hidden)

    def _layer(self, paper: int) -> int:
        return paper * self._shape.layers // _PAPER_LAYERS

    def _from(self, first: int, last: int, after: int) -> list[int]:
        """The paper's layers `first` to `last`, scaled, each after layer `after`."""
        start = max(self._layer(first), after + 1)
        return list(range(start, max(self._layer(last), start) + 1))

    def arditi(self) -> App:
        return arditi.app(self._normal(self._shape.hidden))

    def seal(self) -> App:
        app = seal.app(self._vector(), self._layer(20))
        if not self._meaningless_ids:
            return app
        ids = list(range(0, self._shape.vocab, _TOKEN_SHARE))
        sets: dict[str, Any] = dict.fromkeys(app.token_sets, ids)
        return App(app.name, app.functions, app.tensors, sets)

    def cast(self) -> App:
        condition = self._layer(7)
        return cast.app(
            self._normal(self._shape.hidden),
            self._vector(),
            [condition],
            self._from(15, 23, condition),
            threshold=-1.5,
        )

    def orgad(self) -> App:
        return orgad.app(self._normal(self._shape.hidden), 0.0, self._layer(15))

    def sake(self) -> App:
        rows = (_RANK, self._shape.hidden)
        edit = sake.Edit(
            centre=torch.zeros(self._shape.hidden),
            threshold=_OPEN_DISTANCE,
            u=_SIZE * self._normal(*rows),
            v=self._normal(*rows) / self._shape.hidden**0.5,
            bias=self._normal(_RANK),
            offset=self._vector(),
        )
        return sake.app([edit])

    def kts(self) -> App:
        probe = self._layer(5)
        return kts.app(
            self._vector(),
            _SIZE * self._normal(self._shape.hidden),
            _OPEN_BIAS,
            self._from(11, 30, probe),
            probe_layer=probe,
        )

    def steermoe(self) -> App:
        layers = range(0, self._shape.layers, _EXPERT_LAYERS)
        # Another expert in each layer, so that no one of them gets all the tokens.
        activate = {layer: [i % self._shape.experts] for i, layer in enumerate(layers)}
        deactivate = {
            layer: [(i + 1) % self._shape.experts] for i, layer in enumerate(layers)
        }
        return steermoe.app(activate, deactivate)
