"""The tensors that functions name: which shape each parameter takes."""

from typing import Final, Literal, NoReturn

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context, VectorInfo, VectorTable
from eyesplice.fx_passes.plain import suggestion
from eyesplice.fx_passes.sites import Submodule

Form = Literal["vector", "rows", "numbers"]

_ADD: Final = "put its file into the engine's folder of vectors and start it again"


def check_tensor(
    field: str, name: str, form: Form, submodule: Submodule, context: Context
) -> int:
    """Refuse a tensor that is not there or does not fit the parameter.

    Args:
        field: the parameter, for the error.
        name: the tensor's registered name.
        form: one `[width]` row at each layer; `[rows, width]`; or `[numbers]`. The same
            at each layer, or with an axis of decoder layers in front.
        submodule: whose width counts; any for numbers.
        context: what the model offers.

    Returns:
        Rows, or numbers, at each layer.

    Raises:
        SpecError: an unknown name or another shape.
    """
    info = context.vectors.info(name)
    if info is None:
        _refuse_name(field, name, context)
    shape = info.shape
    axes = {"vector": 1, "rows": 2, "numbers": 1}[form]
    if form == "rows" and len(shape) == 1:
        shape = (1, *shape)
    if not axes <= len(shape) <= axes + 1:
        width = "numbers" if form == "numbers" else str(context.widths[submodule])
        rows = "rows, " if form == "rows" else ""
        _refuse_shape(
            field, info, f"the shape [{rows}{width}] or [layers, {rows}{width}]"
        )
    if len(shape) > axes and shape[0] != context.num_layers:
        count = f"{context.num_layers} rows, one per decoder layer, or one row"
        if axes == 2:
            count = f"{context.num_layers} layers of rows, or only rows"
        _refuse_shape(field, info, count)
    if form != "numbers" and shape[-1] != context.widths[submodule]:
        width = str(context.widths[submodule])
        _refuse_shape(
            field, info, f"rows of {width} elements, the width of {submodule}"
        )
    return {"vector": 1, "rows": shape[-2] if axes == 2 else 1, "numbers": shape[-1]}[
        form
    ]


def values(vectors: VectorTable, name: str, form: Form, layer: int) -> Tensor:
    """What the bank stores of a checked tensor at `layer`, float64.

    Returns:
        `[width]`, `[rows, width]` or `[numbers]`, by the form.
    """
    tensor = vectors.tensor(name)
    axes = 2 if form == "rows" else 1
    if tensor.dim() > axes:
        tensor = tensor[layer]
    tensor = tensor.to(torch.float64)
    return tensor.reshape(-1, tensor.shape[-1]) if form == "rows" else tensor


def digests(vectors: VectorTable, names: set[str]) -> dict[str, str]:
    """Hash of the content of each tensor.

    Raises:
        SpecError: a tensor is no longer registered.
    """
    found = {}
    for name in sorted(names):
        info = vectors.info(name)
        if info is None:
            raise SpecError("vector", name, "a registered vector", _ADD)
        found[name] = info.digest
    return found


def _refuse_name(field: str, name: str, context: Context) -> NoReturn:
    names = sorted(context.vectors.names())
    shown = ", ".join(names[:20]) or "none yet"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    raise SpecError(
        field,
        name,
        f"a registered vector: {shown}{more}",
        suggestion(name, names, f"{_ADD}, or name another"),
    )


def _refuse_shape(field: str, info: VectorInfo, allowed: str) -> NoReturn:
    raise SpecError(
        field,
        f"{info.name} of shape {list(info.shape)}",
        f"a vector with {allowed}",
        "use a vector made for this model and submodule",
    )
