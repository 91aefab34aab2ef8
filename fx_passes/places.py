"""Where a function acts: its submodule and layers, checked against what is armed."""

from collections.abc import Iterable
from itertools import groupby

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.models import FunctionModel
from eyesplice.fx_passes.sites import (
    SUBMODULES,
    Site,
    Submodule,
    parse_layers,
    parse_submodule,
)


def place(
    model: FunctionModel, default: Submodule, num_layers: int
) -> tuple[Submodule, tuple[int, ...]]:
    """The submodule and the ascending layers of a function.

    Args:
        model: what its author wrote.
        default: the submodule if none is written.
        num_layers: decoder layers of the model.

    Raises:
        SpecError: unknown, out of range, or layers beside an alias that names another.
    """
    if model.submodule is None and "submodule" not in model.model_fields_set:
        return default, parse_layers(model.layers, num_layers)
    submodule, alias_layer = parse_submodule(model.submodule)
    if alias_layer is None:
        return submodule, parse_layers(model.layers, num_layers)
    try:
        layers = parse_layers(alias_layer, num_layers)
    except SpecError as error:
        allowed = f"blocks.0 to blocks.{num_layers - 1}"
        raise SpecError("submodule", model.submodule, allowed, error.remedy) from None
    if model.layers is not None and parse_layers(model.layers, num_layers) != layers:
        raise SpecError(
            "layers",
            model.layers,
            f"{layers[0]}, the layer that {model.submodule} names",
            "leave layers out, or use blocks.*",
        )
    return submodule, layers


def check_printable(field: str, label: str | None) -> None:
    """Refuse labels with control characters and the like."""
    if label is not None and not label.isprintable():
        raise SpecError(field, label, "printable characters", "use a plain name")


def check_armed(
    submodule: Submodule, layers: tuple[int, ...], context: Context
) -> None:
    """Refuse sites that nothing can be done at.

    Raises:
        SpecError: the first such site, why, and which sites are armed.
    """
    for layer in layers:
        site = Site(layer, submodule)
        reason = context.armed.get(site, "it was not requested at start-up")
        if reason is not None:
            raise SpecError(
                "site",
                str(site),
                f"the armed sites: {_armed(context)}. This one is not armed: {reason}",
                "name an armed site, or have this one armed as well: `sites` in the "
                "configuration replaces its default, so name there what else you need",
            )


def _armed(context: Context) -> str:
    """Each armed submodule with its layers, for an error."""
    layers = {
        submodule: sorted(
            site.layer
            for site, reason in context.armed.items()
            if site.submodule == submodule and reason is None
        )
        for submodule in SUBMODULES
    }
    shown = [f"{name}[{_ranges(found)}]" for name, found in layers.items() if found]
    return ", ".join(shown) or "none"


def _ranges(ascending: Iterable[int]) -> str:
    """Numbers as "0-3,5"."""
    runs = groupby(enumerate(ascending), key=lambda pair: pair[1] - pair[0])
    groups = [[number for _, number in run] for _, run in runs]
    return ",".join(
        str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
        for group in groups
    )
