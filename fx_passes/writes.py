"""One write: read from its entry, checked against the model, and normalised."""

from dataclasses import dataclass, fields
from typing import Any, Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import resolve_condition
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.custom_ops import find_op
from eyesplice.fx_passes.experts import parse_experts
from eyesplice.fx_passes.kernels import (
    FUNCTIONS,
    WRITE_KERNELS,
    fields_of,
    is_own_op,
    known_kernel,
)
from eyesplice.fx_passes.marked import normalise
from eyesplice.fx_passes.models import WriteModel, check_own_fields, validate
from eyesplice.fx_passes.origin import OWN, Origin
from eyesplice.fx_passes.places import check_armed, check_printable, place
from eyesplice.fx_passes.plain import number, within
from eyesplice.fx_passes.sites import Submodule
from eyesplice.fx_passes.tensors import Form, check_tensor

_DEFAULTS: Final = {
    "offset": 0.0,
    "bias": 0.0,
    "threshold": 0.0,
    "value": 0.0,
    "epsilon": 0.01,
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
            affine           h += scale * sum_r f(v_r.h + bias_r) u_r
            replace          h += scale * (v - h)
            mask             h += scale * h * v, elementwise
            feature_clamp    h += scale * (value - a) v, where a is the activation
                             p = weight.h + bias if p > threshold, else 0
            router           s = log_softmax(h); max(s) + epsilon for experts to activate,
                             min(s) - epsilon for those to deactivate, s for the others
            lib::op          what a user's own op does with scale and weight
        vector: name of the registered tensor v; None for kernels without.
        layers: ascending decoder layers.
        submodule: the value of each layer that is written.
        scale: factor of the write.
        when: condition on the token, single-spaced, token sets under full names.
        lo: lower bound of clamp, in units of p; None for no bound.
        hi: upper bound of clamp, in units of p; None for no bound.
        offset: threshold of one_sided, in units of p.
        name: the client's label, or that of an app's function.
        gate: condition on scores, reads under full names; None for no gate.
        preserve_norm: whether h is then scaled to the length that it had before.
        weight: name of feature_clamp's encoder row, or of the rows of a user's own op.
        u: name of affine's rows u_r.
        v: name of affine's rows v_r.
        bias: feature_clamp's bias, or the name of affine's biases.
        function: affine's f.
        threshold: of feature_clamp.
        value: of feature_clamp.
        activate: experts to activate, for each of `layers`.
        deactivate: experts to deactivate, for each of `layers`.
        epsilon: of router.
        app: the app that it is of.
    """

    kernel: str
    vector: str | None
    layers: tuple[int, ...]
    submodule: Submodule
    scale: float = 1.0
    when: str = "all"
    lo: float | None = None
    hi: float | None = None
    offset: float | None = None
    name: str | None = None
    gate: str | None = None
    preserve_norm: bool = False
    weight: str | None = None
    u: str | None = None
    v: str | None = None
    bias: float | str | None = None
    function: str | None = None
    threshold: float | None = None
    value: float | None = None
    activate: tuple[tuple[int, ...], ...] | None = None
    deactivate: tuple[tuple[int, ...], ...] | None = None
    epsilon: float | None = None
    app: str | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that it uses."""
        named = (self.vector, self.weight, self.u, self.v, self.bias)
        return tuple(name for name in named if isinstance(name, str))

    def to_json(self) -> dict[str, object]:
        """The write as a request states it, absent fields left out."""
        result: dict[str, object] = {"write": self.kernel, "layers": list(self.layers)}
        for key in (f.name for f in fields(self) if f.name not in ("kernel", "layers")):
            value = getattr(self, key)
            if key in ("activate", "deactivate") and value is not None:
                value = {
                    str(layer): list(experts)
                    for layer, experts in zip(self.layers, value, strict=True)
                }
            if value is not None and value is not False:
                result[key] = value
        if self.kernel == "router":
            del result["scale"]
        return result


def parse_write(
    value: object, path: str, context: Context, origin: Origin = OWN
) -> Write:
    """The write that one entry states; its gate is not resolved yet.

    Args:
        value: plain JSON value.
        path: where it stands in the request, e.g. `writes[0]`.
        context: what the model offers.
        origin: whether it is the request's own or an app's.

    Raises:
        SpecError: malformed, or a kernel, tensor, layer or site that is not there.
    """
    model = validate(WriteModel, value, path)
    with within(path):
        kernel = _kernel(model.write, origin, context)
        check_own_fields("write", kernel, model)
        # An op of the user's own has a tensor or has none.
        optional = is_own_op(kernel) and model.weight is None
        own_fields = () if optional else fields_of("write", kernel)
        tensors = origin.tensors(model, own_fields, value)
        check_printable("name", model.name)
        when = resolve_condition(model.when, origin.token_names(context))
        router: dict[str, Any] = {}
        if kernel == "router":
            submodule, layers, router = parse_experts(model, context)
        else:
            submodule, layers = place(model, "residual.post", context.num_layers)
        check_armed(submodule, layers, context)
        _check_numbers(kernel, model)
        _check_tensors(kernel, tensors, submodule, context)
        own = {key: _own(key, kernel, model) for key in _OWN} | tensors | router
    return Write(
        kernel=kernel,
        layers=layers,
        submodule=submodule,
        when=when,
        name=origin.name(model.name),
        gate=None if model.gate is None else normalise(model.gate),
        scale=number(model.scale),
        preserve_norm=model.preserve_norm,
        app=origin.app,
        **{"vector": None, **own},
    )


_OWN: Final = (
    "lo",
    "hi",
    "offset",
    "threshold",
    "value",
    "epsilon",
    "function",
    "bias",
)


def _kernel(name: str, origin: Origin, context: Context) -> str:
    """The kernel of this name; a user's own op if apps may use it or one does.

    Raises:
        SpecError: there is none, or an op that only apps can bring.
    """
    if not is_own_op(name):
        return known_kernel("write", name, WRITE_KERNELS)
    if origin.app is not None:
        find_op(name)
    elif name not in (known := sorted({custom.op for custom in context.custom})):
        raise SpecError(
            "write",
            name,
            f"the write kernels {', '.join(WRITE_KERNELS)}; of users' own ops those of "
            f"the deployed apps: {', '.join(known) or 'none'}",
            "put it into an app and restart the engine with it",
        )
    return name


def _own(key: str, kernel: str, model: WriteModel) -> float | str | None:
    """A field of the kernel with its default, None where the kernel has it not."""
    if key not in fields_of("write", kernel):
        return None
    value: float | str | None = getattr(model, key)
    if key == "function":
        return value or FUNCTIONS["write", kernel][0]
    if value is None and key in _DEFAULTS and kernel != "affine":
        return _DEFAULTS[key]
    return value if value is None or isinstance(value, str) else number(value)


def _check_numbers(kernel: str, model: WriteModel) -> None:
    if kernel == "affine" and isinstance(model.bias, float | int):
        raise SpecError(
            "bias",
            model.bias,
            "for affine, the name of a registered tensor of one number per row",
            "register the biases as a tensor",
        )
    if kernel == "feature_clamp" and isinstance(model.bias, str):
        raise SpecError("bias", model.bias, "for feature_clamp, a number", "send one")
    if kernel == "router" and model.epsilon is not None and model.epsilon < 0:
        raise SpecError("epsilon", model.epsilon, "at least 0", "leave it out")
    if kernel != "clamp":
        return
    if model.lo is None and model.hi is None:
        raise SpecError("lo", None, "clamp with lo, hi or both", "give a bound")
    if model.lo is not None and model.hi is not None and model.lo > model.hi:
        raise SpecError(
            "lo", model.lo, f"at most hi, {model.hi}", "exchange the bounds"
        )


def _check_tensors(
    kernel: str,
    tensors: dict[str, str],
    submodule: Submodule,
    context: Context,
) -> None:
    if kernel != "affine":
        form: Form = "rows" if is_own_op(kernel) else "vector"
        for field, name in tensors.items():
            check_tensor(field, name, form, submodule, context)
        return
    rank = check_tensor("u", tensors["u"], "rows", submodule, context)
    forms: dict[str, Form] = {"v": "rows", "bias": "numbers"}
    for field, form in forms.items():
        if field not in tensors:
            continue
        found = check_tensor(field, tensors[field], form, submodule, context)
        if found != rank:
            raise SpecError(
                field,
                f"{tensors[field]} of {found} {form}",
                f"{rank}, as many as the rows of u",
                "use tensors of one rank",
            )
