"""One write of a request: read, checked against the model, and normalised."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, NoReturn, get_args

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import normalise, parse_condition
from eyesplice.fx_passes.context import Context, VectorInfo
from eyesplice.fx_passes.models import AVAILABLE, WriteModel, validate
from eyesplice.fx_passes.plain import did_you_mean, within
from eyesplice.fx_passes.sites import (
    SUBMODULES,
    Site,
    Submodule,
    parse_layers,
    parse_submodule,
)

Kernel = Literal["steering_vector", "ablate", "clamp", "one_sided"]
KERNELS: Final[tuple[Kernel, ...]] = get_args(Kernel)

_LATER_KERNELS: Final = ("affine", "replace", "mask", "feature_clamp", "router")
_OWN_FIELDS: Final[dict[Kernel, tuple[str, ...]]] = {
    "steering_vector": (),
    "ablate": (),
    "clamp": ("lo", "hi"),
    "one_sided": ("offset",),
}


@dataclass(frozen=True, slots=True)
class Write:
    """One write, with nothing left to resolve.

    Attributes:
        kernel: what is done to the value h of a site, with p = v.h / |v|.
            steering_vector  h += scale * v
            ablate           h -= scale * (v.h) v / |v|^2
            clamp            h += scale * (min(max(p, lo), hi) - p) v / |v|
            one_sided        h -= scale * relu(p - offset) v / |v|
        vector: name of the registered vector v.
        layers: ascending decoder layers.
        submodule: the value of each layer that is written.
        scale: factor of the write.
        when: condition on the token, single-spaced.
        lo: lower bound of clamp, in units of p; None for no bound.
        hi: upper bound of clamp, in units of p; None for no bound.
        offset: threshold of one_sided, in units of p; None for the other kernels.
        name: the client's label.
    """

    kernel: Kernel
    vector: str
    layers: tuple[int, ...]
    submodule: Submodule
    scale: float = 1.0
    when: str = "all"
    lo: float | None = None
    hi: float | None = None
    offset: float | None = None
    name: str | None = None

    def to_json(self) -> dict[str, object]:
        """The write as a request states it, absent fields left out."""
        fields: dict[str, object] = {
            "write": self.kernel,
            "vector": self.vector,
            "layers": list(self.layers),
            "submodule": self.submodule,
            "scale": self.scale,
            "when": self.when,
            "lo": self.lo,
            "hi": self.hi,
            "offset": self.offset,
            "name": self.name,
        }
        return {key: value for key, value in fields.items() if value is not None}


def parse_write(value: object, path: str, context: Context) -> Write:
    """The write that one item of `writes` states.

    Args:
        value: plain JSON value.
        path: where it stands in the request, e.g. `writes[0]`.
        context: what the model offers.

    Raises:
        SpecError: malformed, or a kernel, vector, layer or site that is not there.
    """
    model = validate(WriteModel, value, path)
    with within(path):
        kernel = _kernel(model.write)
        _check_own_fields(kernel, model)
        submodule, layers = _place(model, context.num_layers)
        _check_printable("vector", model.vector)
        _check_printable("name", model.name)
        when = normalise(model.when)
        parse_condition(model.when)
        _check_armed(submodule, layers, context)
        _check_vector(model.vector, submodule, context)
    return Write(
        kernel=kernel,
        vector=model.vector,
        layers=layers,
        submodule=submodule,
        scale=_number(model.scale),
        when=when,
        lo=None if model.lo is None else _number(model.lo),
        hi=None if model.hi is None else _number(model.hi),
        offset=_number(model.offset or 0.0) if kernel == "one_sided" else None,
        name=model.name,
    )


def _number(value: float) -> float:
    """The float of an int or float; -0.0 becomes 0.0, so equal writes hash equally."""
    return float(value) + 0.0


def _kernel(name: str) -> Kernel:
    for kernel in KERNELS:
        if name == kernel:
            return kernel
    known_later = name in _LATER_KERNELS or "::" in name or "." in name
    note = ". This kernel is not available in this version" if known_later else ""
    near = did_you_mean(name, KERNELS)
    raise SpecError(
        "write",
        name,
        AVAILABLE + note,
        f"write {near} (did you mean that?)" if near else "use one of these kernels",
    )


def _check_own_fields(kernel: Kernel, model: WriteModel) -> None:
    for fields in _OWN_FIELDS.values():
        for field in fields:
            value = getattr(model, field)
            if value is not None and field not in _OWN_FIELDS[kernel]:
                owner = next(k for k in KERNELS if field in _OWN_FIELDS[k])
                raise SpecError(
                    field,
                    value,
                    f"only with the kernel {owner}, not with {kernel}",
                    f"leave {field} out",
                )
    if kernel != "clamp":
        return
    if model.lo is None and model.hi is None:
        raise SpecError("lo", None, "clamp with lo, hi or both", "give a bound")
    if model.lo is not None and model.hi is not None and model.lo > model.hi:
        raise SpecError(
            "lo", model.lo, f"at most hi, {model.hi}", "exchange the bounds"
        )


def _place(model: WriteModel, num_layers: int) -> tuple[Submodule, tuple[int, ...]]:
    submodule, alias_layer = parse_submodule(model.submodule)
    if alias_layer is None:
        return submodule, parse_layers(model.layers, num_layers)
    layers = parse_layers(alias_layer, num_layers)
    if model.layers is not None and parse_layers(model.layers, num_layers) != layers:
        raise SpecError(
            "layers",
            model.layers,
            f"{layers[0]}, the layer that {model.submodule} names",
            "leave layers out, or use blocks.*",
        )
    return submodule, layers


def _check_printable(field: str, label: str | None) -> None:
    if label is not None and not label.isprintable():
        raise SpecError(field, label, "printable characters", "use a plain name")


def _check_armed(
    submodule: Submodule, layers: tuple[int, ...], context: Context
) -> None:
    for layer in layers:
        site = Site(layer, submodule)
        reason = context.armed.get(site, "it was not requested at start-up")
        if reason is not None:
            raise SpecError(
                "site",
                str(site),
                f"the armed sites: {_armed(context)}. This one is not armed: {reason}",
                "name an armed site, or add this one to `sites` in the configuration",
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


def _check_vector(name: str, submodule: Submodule, context: Context) -> None:
    info = context.vectors.info(name)
    if info is None:
        _refuse_vector(name, context)
    if info.layers not in (None, context.num_layers):
        _refuse_shape(
            info, f"{context.num_layers} rows, one per decoder layer, or one row"
        )
    width = context.widths[submodule]
    if info.width != width:
        _refuse_shape(info, f"rows of {width} elements, the width of {submodule}")


def _refuse_vector(name: str, context: Context) -> NoReturn:
    names = sorted(context.vectors.names())
    shown = ", ".join(names[:20]) or "none yet"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    near = did_you_mean(name, names)
    raise SpecError(
        "vector",
        name,
        f"a registered vector: {shown}{more}",
        f"write {near} (did you mean that?)"
        if near
        else "register it, or name another",
    )


def _refuse_shape(info: VectorInfo, allowed: str) -> NoReturn:
    rows = "" if info.layers is None else f"{info.layers}, "
    raise SpecError(
        "vector",
        f"{info.name} of shape [{rows}{info.width}]",
        f"a vector with {allowed}",
        "use a vector made for this model and submodule",
    )
