"""A user's own op: whether it is registered, has the one schema, and keeps its contract.

    lib::op(Tensor(a!) value, Tensor gain, Tensor weight) -> ()

    value   [tokens, width], the site's dtype: written in place
    gain    [tokens], fp32: 0 at tokens that must keep every bit, else the scale
    weight  [rows, width], the model's dtype: the function's tensor at this layer
            ([0, width] for a function without one)

Each row is computed from itself, its gain and the weight.
"""

from functools import lru_cache
from typing import Final, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import did_you_mean

SCHEMA: Final = "(Tensor(a!) value, Tensor gain, Tensor weight) -> ()"
_ARGUMENTS: Final = (("value", True), ("gain", False), ("weight", False))
_REMEDY: Final = (
    "register it with torch.library in a module that `op_modules` of the configuration "
    "names"
)
_SIZES: Final = (1, 63, 100)
"""Tokens of the batches on which an op must keep its contract."""


@lru_cache
def find_op(name: str) -> torch._ops.OpOverload:
    """The registered op of this name, its schema and its fake checked.

    Args:
        name: "lib::op".

    Raises:
        SpecError: no such op, another schema, or an op that cannot be traced.
    """
    if name not in (known := _registered(name.partition("::")[0])):
        shown, near = ", ".join(known[:20]) or "nothing", did_you_mean(name, known)
        raise SpecError(
            "write",
            name,
            f"a registered op; of this library there is {shown}",
            (f"write {near} (did you mean that?), or " if near else "") + _REMEDY,
        )
    library, _, op = name.partition("::")
    overloads = getattr(getattr(torch.ops, library), op)
    if overloads.overloads() != ["default"]:
        _refuse_schema(name, f"the overloads {', '.join(overloads.overloads())}")
    found: torch._ops.OpOverload = overloads.default
    arguments = [
        (a.name, a.alias_info is not None and a.alias_info.is_write)
        for a in found._schema.arguments
        if isinstance(a.type, torch.TensorType) and not a.kwarg_only
    ]
    whole = len(found._schema.arguments) == len(arguments)
    if not whole or tuple(arguments) != _ARGUMENTS or found._schema.returns:
        _refuse_schema(name, str(found._schema))
    _check_fake(name, found)
    return found


def schema_of(name: str) -> str:
    """The schema of a registered op, as its registration has it.

    Raises:
        SpecError: as `find_op`.
    """
    return str(find_op(name)._schema)


def _registered(library: str) -> list[str]:
    names = {str(schema.name) for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in names if name.startswith(f"{library}::"))


def _refuse_schema(name: str, found: str) -> NoReturn:
    raise SpecError(
        f"op {name}",
        found,
        f"{name}{SCHEMA}",
        'register it with these arguments and mutates_args={"value"}',
    )


def _check_fake(name: str, op: torch._ops.OpOverload) -> None:
    with FakeTensorMode():
        value, weight = torch.empty(5, 8), torch.empty(2, 8)
        try:
            op(value, torch.empty(5), weight)
        # A fake of one's own fails in its own way.
        except Exception as error:
            _refuse(name, f"fails on fake tensors: {_first_line(error)}", "a fake")


def verify(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """Run the op on random rows and refuse it if it touches what it must not.

    Rows of gain 0 hold NaN in turns with ordinary numbers, negative zeros and infinities,
    and must keep every bit. What they hold must not change the others. Nothing beside
    `value` may be written.

    Args:
        name: "lib::op".
        weight: `[rows, width]`, on the device where the op will run.
        dtype: of `value`.

    Raises:
        SpecError: naming the op and what it did.
    """
    op = find_op(name)
    generator = torch.Generator().manual_seed(0)
    for num_tokens in _SIZES:
        value = torch.randn(num_tokens, weight.shape[1], generator=generator)
        for gains in (torch.zeros(num_tokens), _some_gains(num_tokens)):
            idle = gains == 0
            value = _with_edges(value, idle)
            poisoned = value.masked_fill(
                (idle & _every_second(num_tokens))[:, None], torch.nan
            )
            plain = _run(name, op, value.to(dtype), gains, weight)
            other = _run(name, op, poisoned.to(dtype), gains, weight)
            if not torch.equal(_bits(plain[~idle]), _bits(other[~idle])):
                _refuse(
                    name,
                    "gives a token another result when other tokens hold NaN",
                    "an op that computes each row of `value` from that row alone",
                )


def _with_edges(value: Tensor, idle: Tensor) -> Tensor:
    """The values with numbers in idle rows that arithmetic with a 0 does not keep."""
    edges = torch.tensor([-0.0, torch.inf, -torch.inf])
    rows, columns = (torch.arange(size) for size in value.shape)
    # Every column has each of them in some row: the sign of a weight decides who shows.
    places = rows[:, None] + columns
    return torch.where(idle[:, None] & (columns % 4 < 3), edges[places % 3], value)


def _every_second(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % 4 < 2


def _some_gains(num_tokens: int) -> Tensor:
    """Gains of both signs at every odd token, 0 at the others."""
    at = torch.arange(num_tokens)
    return torch.where(at % 2 == 1, 0.5 - (at % 3), 0.0)


def _run(
    name: str, op: torch._ops.OpOverload, value: Tensor, gains: Tensor, weight: Tensor
) -> Tensor:
    """The rows after the op, on the CPU.

    Raises:
        SpecError: it fails, or writes where it must not.
    """
    num_tokens = len(value)
    # Rows before and after the batch, as other tensors lie around it.
    buffer = torch.full((num_tokens + 2, value.shape[1]), torch.nan, dtype=value.dtype)
    buffer[1:-1] = value
    before, gain, kept = (
        buffer.clone(),
        gains.to(weight.device, copy=True),
        weight.clone(),
    )
    buffer = buffer.to(weight.device)
    try:
        op(buffer[1:-1], gain, weight)
        after = buffer.cpu()
    except Exception as error:
        _refuse(name, f"fails: {_first_line(error)}", "an op that runs on this device")
    if not torch.equal(_bits(weight), _bits(kept)) or not torch.equal(
        gain.cpu(), gains
    ):
        _refuse(name, "writes to gain or weight", "an op that writes to `value` alone")
    still = torch.ones(num_tokens + 2, dtype=torch.bool)
    still[1:-1] = gains == 0
    if not torch.equal(_bits(after[still]), _bits(before[still])):
        _refuse(
            name,
            "changes rows whose gain is 0, or memory beside `value`",
            "an op that leaves every bit of a row of gain 0 as it is, NaN too",
        )
    return after[1:-1]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _refuse(name: str, did: str, allowed: str) -> NoReturn:
    raise SpecError(f"op {name}", did, allowed, "correct the op; docs/apps.md has one")
