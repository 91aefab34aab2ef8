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
    parse_place,
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
    return parse_place(model.submodule, model.layers, num_layers)


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
        remedy = "name an armed site"
        if site in context.armed:
            reason = context.armed[site]
        elif submodule == "router.logits" and not context.num_experts:
            reason = "this model has no experts"
        else:
            reason = "it was not requested at start-up"
            remedy += _or_arm(submodule, layers, context)
        if reason is not None:
            # The whole function is refused: it has no key that holds a site.
            raise SpecError(
                "",
                str(site),
                f"the armed sites: {_armed(context)}. This one is not armed: {reason}",
                remedy,
            )


def _or_arm(submodule: Submodule, layers: tuple[int, ...], context: Context) -> str:
    """What arms these layers too; whoever copies it loses no site that is armed."""
    found = _armed_layers(context)
    asked = {n for n in layers if Site(n, submodule) not in context.armed}
    found[submodule] = sorted(asked.union(found[submodule]))
    entries = (
        name if len(numbers) == context.num_layers else _entry(name, numbers)
        for name, numbers in found.items()
        if numbers
    )
    return (
        f", or give `sites: [{', '.join(entries)}]` in the configuration, "
        "a list that replaces the default"
    )


def _entry(submodule: Submodule, layers: Iterable[int]) -> str:
    """An entry of `sites`, in YAML."""
    runs = (run if run.isdigit() else f'"{run}"' for run in _runs(layers))
    return f"{{submodule: {submodule}, layers: [{', '.join(runs)}]}}"


def _armed_layers(context: Context) -> dict[Submodule, list[int]]:
    """The layers at which each submodule is armed."""
    return {
        submodule: sorted(
            site.layer
            for site, reason in context.armed.items()
            if site.submodule == submodule and reason is None
        )
        for submodule in SUBMODULES
    }


def _armed(context: Context) -> str:
    """Each armed submodule with its layers, for an error."""
    layers = _armed_layers(context)
    shown = [f"{name}[{','.join(_runs(at))}]" for name, at in layers.items() if at]
    return ", ".join(shown) or "none"


def _runs(ascending: Iterable[int]) -> list[str]:
    """Numbers as ["0-3", "5"]."""
    runs = groupby(enumerate(ascending), key=lambda pair: pair[1] - pair[0])
    groups = [[number for _, number in run] for _, run in runs]
    return [
        str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
        for group in groups
    ]
