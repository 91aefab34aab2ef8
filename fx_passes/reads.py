"""One read: read from its entry, checked against the model, and normalised."""

from dataclasses import dataclass, fields

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import resolve_condition
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.kernels import (
    FUNCTIONS,
    READ_FIELDS,
    READ_KERNELS,
    SCORE_KERNELS,
    ReadKernel,
    known_kernel,
)
from eyesplice.fx_passes.marked import normalise
from eyesplice.fx_passes.models import ReadModel, check_own_fields, validate
from eyesplice.fx_passes.origin import OWN, Origin
from eyesplice.fx_passes.places import check_armed, check_printable, place
from eyesplice.fx_passes.plain import number, within
from eyesplice.fx_passes.sites import Submodule
from eyesplice.fx_passes.tensors import check_tensor
from eyesplice.ops.layout import Scope


@dataclass(frozen=True, slots=True)
class Read:
    """One read, with nothing left to resolve.

    Attributes:
        kernel: what is made of the value h of a site, with w the tensor `weight`.
            capture      h itself
            probe        f(w.h + bias)
            dot          w.h
            cosine       w.h / (|w| |h|)
            norm         |h|
            sae          f(w_i.h + bias_i), for each row w_i
            router       the experts of the token, from h
            distance     |h - w|
            tanh_cosine  the cosine of h and tanh((w.h) / (w.w) w)
        layers: ascending decoder layers.
        submodule: the value of each layer that is read.
        when: condition on the token, single-spaced, token sets under full names.
        gate: condition on scores, reads under full names; None for no gate.
        reduce: none, last, mean or max: what the answer makes of the scores.
        over: prompt, generated or request: the tokens that scores are reduced over, in
            the answer and in gates.
        weight: name of the tensor w.
        bias: a number, or for sae the name of a tensor of one number per row.
        function: f of probe and sae.
        threshold: of sae's jump_relu.
        features: rows of sae.
        top_k: experts per token in the answer of router, None for the model's own.
        name: the client's label, or that of an app's function.
        app: the app that it is of.
    """

    kernel: ReadKernel
    layers: tuple[int, ...]
    submodule: Submodule
    when: str = "all"
    gate: str | None = None
    reduce: str = "none"
    over: str = "request"
    weight: str | None = None
    bias: float | str | None = None
    function: str | None = None
    threshold: float | None = None
    features: int | None = None
    top_k: int | None = None
    name: str | None = None
    app: str | None = None

    @property
    def scores(self) -> int:
        """Scores that it makes of each value."""
        return (self.features or 1) if self.kernel in SCORE_KERNELS else 0

    @property
    def scope(self) -> Scope:
        """The tokens that scores are reduced over."""
        return Scope[self.over.upper()]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that it uses."""
        named = (self.weight, self.bias)
        return tuple(name for name in named if isinstance(name, str))

    def to_json(self) -> dict[str, object]:
        """The read as a request states it, absent fields left out."""
        result: dict[str, object] = {"read": self.kernel, "layers": list(self.layers)}
        for key in (f.name for f in fields(self)):
            value = getattr(self, key)
            if key in ("kernel", "layers", "features") or value is None:
                continue
            if key in ("reduce", "over") and self.kernel not in SCORE_KERNELS:
                continue
            result[key] = value
        return result


def parse_read(
    value: object, path: str, context: Context, origin: Origin = OWN
) -> Read:
    """The read that one entry states; its gate is not resolved yet.

    Args:
        value: plain JSON value.
        path: where it stands in the request, e.g. `reads[0]`.
        context: what the model offers.
        origin: whether it is the request's own or an app's.

    Raises:
        SpecError: malformed, or a kernel, tensor, layer or site that is not there.
    """
    model = validate(ReadModel, value, path)
    with within(path):
        kernel = known_kernel("read", model.read, READ_KERNELS)
        check_own_fields("read", kernel, model)
        tensors = origin.tensors(model, READ_FIELDS[kernel], value)
        check_printable("name", model.name)
        when = resolve_condition(model.when, origin.token_names(context))
        submodule, layers = _place(kernel, model, context)
        check_armed(submodule, layers, context)
        _check_numbers(kernel, model, context)
        features = _check_tensors(kernel, tensors, submodule, context)
    function = threshold = None
    if "function" in READ_FIELDS[kernel]:
        function = model.function or FUNCTIONS["read", kernel][0]
        if model.threshold is not None and model.function is None:
            function = "jump_relu"
        threshold = number(model.threshold or 0.0) if function == "jump_relu" else None
    bias: float | str | None = tensors.get("bias")
    if bias is None and "bias" in READ_FIELDS[kernel]:
        bias = 0.0 if model.bias is None else number(float(model.bias))
    return Read(
        kernel=kernel,
        layers=layers,
        submodule=submodule,
        when=when,
        gate=None if model.gate is None else normalise(model.gate),
        reduce=model.reduce,
        over=model.over,
        weight=tensors.get("weight"),
        bias=bias,
        function=function,
        threshold=threshold,
        features=features,
        top_k=model.top_k,
        name=origin.name(model.name),
        app=origin.app,
    )


def _place(
    kernel: ReadKernel, model: ReadModel, context: Context
) -> tuple[Submodule, tuple[int, ...]]:
    default: Submodule = "router.logits" if kernel == "router" else "residual.post"
    submodule, layers = place(model, default, context.num_layers)
    if kernel == "router" and submodule != "router.logits":
        raise SpecError(
            "submodule", model.submodule, "for router, router.logits", "leave it out"
        )
    return submodule, layers


def _check_numbers(kernel: ReadKernel, model: ReadModel, context: Context) -> None:
    if kernel == "probe" and isinstance(model.bias, str):
        raise SpecError("bias", model.bias, "for probe, a number", "send a number")
    if model.threshold is not None and model.function not in (None, "jump_relu"):
        raise SpecError(
            "threshold",
            model.threshold,
            f"only with the function jump_relu, not with {model.function}",
            "leave threshold out",
        )
    experts = context.num_experts
    if model.top_k is not None and model.top_k > experts:
        raise SpecError("top_k", model.top_k, f"1..{experts}", "ask for fewer experts")


def _check_tensors(
    kernel: ReadKernel,
    tensors: dict[str, str],
    submodule: Submodule,
    context: Context,
) -> int | None:
    """The number of sae's features, None for other kernels."""
    if "weight" not in tensors:
        return None
    if kernel != "sae":
        check_tensor("weight", tensors["weight"], "vector", submodule, context)
        return None
    features = check_tensor("weight", tensors["weight"], "rows", submodule, context)
    if "bias" in tensors:
        name = tensors["bias"]
        found = check_tensor("bias", name, "numbers", submodule, context)
        if found != features:
            raise SpecError(
                "bias",
                f"{name} of {found} numbers",
                f"{features} numbers, one for each row of weight",
                "use a bias made for these features",
            )
    return features
