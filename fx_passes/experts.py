"""The experts that a router write activates and deactivates, layer by layer."""

from typing import Any

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.models import Experts, WriteModel
from eyesplice.fx_passes.places import place
from eyesplice.fx_passes.plain import join, renaming
from eyesplice.fx_passes.sites import Submodule, parse_layers

_ROUTER: Submodule = "router.logits"


def parse_experts(
    model: WriteModel, context: Context
) -> tuple[Submodule, tuple[int, ...], dict[str, Any]]:
    """Where a router write acts, and on which experts.

    Lists of experts hold at each of `layers`; objects name the layers themselves.

    Returns:
        The submodule, the layers, and `activate` and `deactivate`: ascending expert
        numbers for each of the layers.

    Raises:
        SpecError: another submodule, no experts at a layer, experts that are not there
            or both activated and deactivated, more activated than a token goes to, or
            fewer left than that.
    """
    by_layer = {
        key: _by_layer(key, getattr(model, key), context)
        for key in ("activate", "deactivate")
    }
    named = {layer for found in by_layer.values() if found for layer in found}
    layers = model.layers
    if layers is None and named and isinstance(model.submodule, str | None):
        layers = sorted(named)
    located = model.model_copy(update={"layers": layers})
    submodule, numbers = place(located, _ROUTER, context.num_layers)
    if submodule != _ROUTER:
        raise SpecError(
            "submodule", model.submodule, f"for router, {_ROUTER}", "leave it out"
        )
    if beyond := sorted(named - set(numbers)):
        raise SpecError(
            "layers",
            model.layers,
            f"layers that have the experts named for layer {beyond[0]}",
            "leave layers out where objects name them",
        )
    chosen = {
        key: tuple(
            tuple(getattr(model, key) or ()) if found is None else found.get(layer, ())
            for layer in numbers
        )
        for key, found in by_layer.items()
    }
    checked: dict[str, Any] = {
        key: tuple(_checked(key, experts, context) for experts in found)
        for key, found in chosen.items()
    }
    for layer, up, down in zip(
        numbers, checked["activate"], checked["deactivate"], strict=True
    ):
        _check_layer(layer, up, down, context)
    return submodule, numbers, checked


def _by_layer(
    key: str, value: Experts | None, context: Context
) -> dict[int, tuple[int, ...]] | None:
    """The experts of each layer that an object names, None where it is a list."""
    if not isinstance(value, dict):
        return None
    found: dict[int, tuple[int, ...]] = {}
    for text, experts in value.items():
        with renaming({"layers": key}):
            layers = parse_layers(text, context.num_layers)
        for layer in layers:
            if layer in found:
                raise SpecError(
                    join(key, text),
                    experts,
                    f"each layer once; layer {layer} has experts already",
                    "name each layer once",
                )
            found[layer] = tuple(experts)
    return found


def _checked(key: str, experts: tuple[int, ...], context: Context) -> tuple[int, ...]:
    for expert in experts:
        if not 0 <= expert < context.num_experts:
            raise SpecError(
                key,
                expert,
                f"experts 0..{context.num_experts - 1} of this model"
                if context.num_experts
                else "a mixture-of-experts model; this one has no experts",
                "name experts of this model",
            )
    return tuple(sorted(set(experts)))


def _check_layer(
    layer: int, up: tuple[int, ...], down: tuple[int, ...], context: Context
) -> None:
    if not up and not down:
        raise SpecError(
            "activate",
            [],
            f"experts to activate or deactivate at layer {layer}",
            "name experts there, or leave the layer out",
        )
    if both := sorted(set(up) & set(down)):
        raise SpecError(
            "activate",
            both[0],
            f"experts that layer {layer} does not deactivate too",
            "leave it out of one of the lists",
        )
    check_numbers(layer, len(up), len(down), context, "")


def check_numbers(
    layer: int, up: int, down: int, context: Context, prefix: str
) -> None:
    """Refuse more activated experts than a token goes to, or fewer left than that.

    Args:
        layer: for messages.
        up, down: how many are activated and deactivated there.
        context: what the model offers.
        prefix: of the field in messages, where several writes are meant; else "".

    Raises:
        SpecError: naming the field.
    """
    top_k, most = context.experts_per_token, context.num_experts
    together = " with the writes before it" if prefix else ""
    if up > top_k:
        raise SpecError(
            f"{prefix}activate",
            f"{up} experts at layer {layer}{together}",
            f"at most {top_k}, the experts that a token goes to",
            "activate fewer",
        )
    if down > most - top_k:
        raise SpecError(
            f"{prefix}deactivate",
            f"{down} of {most} experts at layer {layer}{together}",
            f"at most {most - top_k}: a token goes to {top_k}, and which of the "
            "deactivated ones it would go to is by chance",
            "deactivate fewer",
        )
