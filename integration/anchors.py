"""Makes the program tables inputs of the compiled graph.

Dynamo lifts the buffers of a module as graph inputs when the traced code reads them. A
forward pre-hook on each decoder layer reads them into an `anchor` op, which the splice
erases again. The compiled code fetches the buffers from the live modules by name, so on
a warm start, where nothing is traced, registering them is enough.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import Tensor, nn

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.integration import ledger
from eyesplice.integration.buffers import Buffers
from eyesplice.ops import contracts

_PREFIX: Final = "eyesplice_"

Anchor = tuple[nn.Module, str, Tensor]
"""A layer, and a buffer of it by name."""


def find_layers(model: nn.Module) -> tuple[nn.Module, str]:
    """The decoder's compiled module, and the path of its layers below it.

    Returns:
        The compiled module with the longest list of layers, and a path like "layers".

    Raises:
        LookupError: no compiled module has a list of layers.
    """
    compiled = ledger.COMPILED_BASE.get()
    best: tuple[int, nn.Module, str] | None = None
    for root in model.modules():
        if not isinstance(root, compiled) or getattr(root, "do_not_compile", False):
            continue
        for path, module in root.named_modules():
            # A list inside another (experts of a layer) is not the decoder's.
            is_list = isinstance(module, nn.ModuleList) and not _inside_list(path)
            if is_list and (best is None or len(module) > best[0]):
                best = (len(module), root, path)
    if best is None:
        raise LookupError(
            "no module of this model that vLLM compiles has a list of layers"
        )
    return best[1], best[2]


def _inside_list(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def anchor_layers(
    root: nn.Module,
    plan: SplicePlan,
    buffers: Buffers,
    weights: Sequence[Tensor] = (),
) -> list[Anchor]:
    """Register the tables on the decoder layers, and the hooks that read them.

    Args:
        root: the compiled module.
        plan: tells which tables each layer lists.
        buffers: the tables, which must live as long as the model runs.
        weights: of the users' own ops of the plan.

    Returns:
        What was registered, for `register`.
    """
    anchors: list[Anchor] = []
    layers = root.get_submodule(plan.layers_path)
    assert isinstance(layers, nn.ModuleList)
    for number, layer in enumerate(layers):
        tables = plan.tables_of_layer(number)
        if not tables:
            continue
        own = [buffers.program[buffers.index[table]] for table in tables]
        own += [weights[custom.number] for custom in plan.custom_of_layer(number)]
        anchors += [
            (layer, f"{_PREFIX}own_{place}", tensor) for place, tensor in enumerate(own)
        ]
        layer.eyesplice_layer = number  # type: ignore[assignment]
        layer.eyesplice_own = len(own)  # type: ignore[assignment]
        layer.register_forward_pre_hook(_anchor)
    register(anchors)
    return anchors


def register(anchors: Iterable[Anchor]) -> None:
    """Register the tables on their layers; safe to call again.

    vLLM 0.25.1 takes a layer's buffers away when it loads weights anew, and brings back
    those that were there before the first weights were loaded.
    """
    for layer, name, tensor in anchors:
        layer.register_buffer(name, tensor, persistent=False)


def _anchor(layer: Any, args: Any) -> None:
    # Dynamo traces this: plain attribute reads only.
    places = range(layer.eyesplice_own)
    tensors = [getattr(layer, f"{_PREFIX}own_{place}") for place in places]
    contracts.anchor(tensors, layer.eyesplice_layer)
