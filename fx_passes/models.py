"""The shapes of a request's objects, and one readable error for each misfit."""

from typing import Annotated, Any, ClassVar, Final, NoReturn, TypeVar

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
from eyesplice.fx_passes.plain import did_you_mean, join
from eyesplice.fx_passes.program import FLOAT32_LIMIT

MAX_WRITES: Final = 256
AVAILABLE: Final = (
    "what this version has: writes with the kernels steering_vector, ablate, clamp and "
    "one_sided, each with a `when`"
)

Number = Annotated[
    float, Strict(), AllowInfNan(False), Field(ge=-FLOAT32_LIMIT, le=FLOAT32_LIMIT)
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]

_NUMBER: Final = f"a number within -{FLOAT32_LIMIT:g}..{FLOAT32_LIMIT:g}"
_NAME: Final = "a string of 1 to 256 printable characters"


class StrictModel(BaseModel):
    """Strict, closed and frozen; `unavailable` are keys of later versions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unavailable: ClassVar[frozenset[str]] = frozenset()


class RequestModel(StrictModel):
    """The object under the key `eyesplice`."""

    unavailable = frozenset({"apps", "reads", "stream_scores"})

    writes: list[Any] = Field(
        [],
        max_length=MAX_WRITES,
        description=f"a list of at most {MAX_WRITES} write objects",
    )
    hotwire: Any = None


class WriteModel(StrictModel):
    """One item of `writes`."""

    unavailable = frozenset({"gate", "preserve_norm", "reduce", "over"})

    write: str = Field("steering_vector", description="the name of a write kernel")
    vector: Name = Field(description=f"the name of a registered vector, {_NAME}")
    layers: Any = None
    submodule: Any = "residual.post"
    scale: Number = Field(1.0, description=_NUMBER)
    when: str = Field("all", description="a condition, as a string")
    lo: Number | None = Field(None, description=_NUMBER)
    hi: Number | None = Field(None, description=_NUMBER)
    offset: Number | None = Field(None, description=_NUMBER)
    name: Name | None = Field(None, description=_NAME)


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
    raise SpecError(join(path, key), misfit["input"], allowed, f"correct {key}")


def _refuse_key(
    model: type[StrictModel], key: str, value: object, path: str
) -> NoReturn:
    where = join(path, key)
    if key in model.unavailable:
        raise SpecError(
            where,
            value,
            f"{AVAILABLE}. The key {key} is not available in this version",
            f"leave {key} out",
        )
    near = did_you_mean(key, model.model_fields)
    remedy = f"write {near} (did you mean that?)" if near else "leave it out"
    raise SpecError(f"unknown key {where} with value", value, _keys(model), remedy)


def _keys(model: type[StrictModel]) -> str:
    return "the keys " + ", ".join(model.model_fields)
