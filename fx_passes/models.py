"""The shapes of a request's objects, and one readable error for each misfit."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

from pydantic import (
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
)

from eyesplice._errors import SpecError
from eyesplice.fx_passes.kernels import FIELDS, FUNCTIONS, Kind, fields_of
from eyesplice.fx_passes.plain import join, suggestion
from eyesplice.fx_passes.program import FLOAT32_LIMIT

MAX_FUNCTIONS: Final = 256
"""Reads and writes of one request, those of its apps counted."""

Number = Annotated[
    float, Strict(), AllowInfNan(False), Field(ge=-FLOAT32_LIMIT, le=FLOAT32_LIMIT)
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Experts = list[int] | dict[str, list[int]]

_NUMBER: Final = f"a number within -{FLOAT32_LIMIT:g}..{FLOAT32_LIMIT:g}"
_NAME: Final = "a string of 1 to 256 printable characters"
_TENSOR: Final = f"the name of a registered tensor, {_NAME}"
_EXPERTS: Final = (
    'a list of expert numbers, or an object from layers to such lists ({"3": [0, 5]})'
)


class StrictModel(BaseModel):
    """Strict, closed and frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class RequestModel(StrictModel):
    """The object under the key `eyesplice`."""

    apps: dict[Name, dict[str, Any]] | None = Field(
        None,
        max_length=MAX_FUNCTIONS,
        description="an object from names of apps to objects of overrides",
    )
    writes: list[Any] = Field(
        [],
        max_length=MAX_FUNCTIONS,
        description=f"a list of at most {MAX_FUNCTIONS} write objects",
    )
    reads: list[Any] = Field(
        [],
        max_length=MAX_FUNCTIONS,
        description=f"a list of at most {MAX_FUNCTIONS} read objects",
    )
    stream_scores: bool = Field(False, description="true or false")
    hotwire: Any = None


class FunctionModel(StrictModel):
    """The fields that reads and writes share."""

    name: Name | None = Field(None, description=_NAME)
    layers: Any = None
    submodule: Any = None
    when: str = Field("all", description="a condition, as a string")
    gate: str | None = Field(None, description="a condition on scores, as a string")
    weight: Name | None = Field(None, description=_TENSOR)
    bias: Number | Name | None = Field(
        None, description=f"{_NUMBER}, or the name of a registered tensor"
    )
    function: str | None = Field(None, description="the name of a scalar function")
    threshold: Number | None = Field(None, description=_NUMBER)


class WriteModel(FunctionModel):
    """One item of `writes`, or one write of an app."""

    write: str = Field("steering_vector", description="the name of a write kernel")
    vector: Name | None = Field(None, description=_TENSOR)
    scale: Number = Field(1.0, description=_NUMBER)
    preserve_norm: bool = Field(False, description="true or false")
    lo: Number | None = Field(None, description=_NUMBER)
    hi: Number | None = Field(None, description=_NUMBER)
    offset: Number | None = Field(None, description=_NUMBER)
    u: Name | None = Field(None, description=_TENSOR)
    v: Name | None = Field(None, description=_TENSOR)
    value: Number | None = Field(None, description=_NUMBER)
    activate: Experts | None = Field(None, description=_EXPERTS)
    deactivate: Experts | None = Field(None, description=_EXPERTS)
    epsilon: Number | None = Field(None, description=_NUMBER)


class ReadModel(FunctionModel):
    """One item of `reads`, or one read of an app."""

    read: str = Field(description="the name of a read kernel")
    reduce: Literal["none", "last", "mean", "max"] = Field(
        "none", description="none, last, mean or max"
    )
    over: Literal["prompt", "generated", "request"] = Field(
        "request", description="prompt, generated or request"
    )
    top_k: int | None = Field(None, ge=1, description="a number of experts, at least 1")


M = TypeVar("M", bound=StrictModel)


def validate(model: type[M], value: object, path: str) -> M:
    """The value as a `model`.

    Args:
        model: the shape to check against.
        value: plain JSON value.
        path: where the value stands in the request, empty for the whole of it.

    Raises:
        SpecError: the first misfit, with its path.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        misfit = next(
            (d for d in details if d["type"] == "extra_forbidden"), details[0]
        )
    key = str(misfit["loc"][0]) if misfit["loc"] else ""
    if misfit["type"] == "extra_forbidden":
        _refuse_key(model, key, misfit["input"], path)
    if misfit["type"] == "missing":
        raise SpecError(
            path or "eyesplice", value, f"an object with the key {key}", f"add {key}"
        )
    if not key:
        raise SpecError(
            path or "eyesplice",
            value,
            f"an object with {_keys(model)}",
            "send an object",
        )
    allowed = model.model_fields[key].description or misfit["msg"]
    found = value[key] if isinstance(value, Mapping) else misfit["input"]
    raise SpecError(join(path, key), found, allowed, f"correct {key}")


def check_own_fields(kind: Kind, kernel: str, model: FunctionModel) -> None:
    """Refuse fields that say something and belong to other kernels.

    A user's own op takes `weight` and `scale`.

    Raises:
        SpecError: such a field, with the kernels that have it; or a `function` that the
            kernel lacks.
    """
    own = fields_of(kind, kernel)
    owners: dict[str, list[str]] = {}
    for other, fields in FIELDS[kind].items():
        for field in fields:
            owners.setdefault(field, []).append(other)
    for field, others in owners.items():
        value = getattr(model, field)
        if field not in own and value != type(model).model_fields[field].default:
            plural = "s" if len(others) > 1 else ""
            raise SpecError(
                field,
                value,
                f"only with the kernel{plural} {', '.join(others)}, not with {kernel}",
                f"leave {field} out",
            )
    functions = FUNCTIONS.get((kind, kernel), ())
    if model.function is not None and model.function not in functions:
        raise SpecError(
            "function",
            model.function,
            f"for {kernel}, {', '.join(functions)}",
            "use one of these functions",
        )


def _refuse_key(
    model: type[StrictModel], key: str, value: object, path: str
) -> NoReturn:
    remedy = suggestion(key, model.model_fields, "leave it out")
    where = join(path, key)
    raise SpecError(f"unknown key {where} with value", value, _keys(model), remedy)


def _keys(model: type[StrictModel]) -> str:
    names = list(model.model_fields)
    # The kernel first: inherited fields come before it.
    names.sort(key=lambda name: name not in ("read", "write"))
    return "the keys " + ", ".join(names)
