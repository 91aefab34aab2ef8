"""The independent judge of functions: reads, writes and gates as hooks, told in Python.

A `Fn` says to the oracle what one entry of a request or an app says to the engine. The
oracle runs the whole sequence at once, so a score is a row of numbers over all tokens
and everything that depends on earlier ones is a cumulative sum, maximum or `any`.
Nothing here knows the package under test.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from tests.oracle import (
    SUBMODULES,
    Edit,
    Intervention,
    Mask,
    all_tokens,
)

ReadRow = Callable[[Tensor], Tensor]
"""`h [tokens, width]` to a score `[tokens]`, or `[tokens, features]`."""


@dataclass
class Run:
    """What one forward pass of the oracle found.

    Attributes:
        positions: of the tokens.
        prompt_len: tokens of the prompt.
        scores: by (name, layer): fp32 `[tokens]`, NaN where nothing was read.
        evaluated: by write: tokens where its `when` held, at its first layer.
        fired: by write: tokens on which it acted, at its first layer.
        rows: by (name, layer): the captured rows `[tokens, width]`, all of them.
    """

    positions: Tensor
    prompt_len: int
    scores: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    evaluated: dict[str, Tensor] = field(default_factory=dict)
    fired: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[tuple[str, int], Tensor] = field(default_factory=dict)


Gate = Callable[[Run], Tensor]
"""Which tokens pass: bool `[tokens]`."""


@dataclass(frozen=True)
class Fn:
    """One function: a read if `read` is given, a capture if neither, else a write."""

    name: str
    submodule: str
    layers: Sequence[int]
    edit: Edit | None = None
    read: ReadRow | None = None
    when: Mask = all_tokens
    gate: Gate | None = None

    def chosen(self, run: Run) -> tuple[Tensor, Tensor]:
        """Tokens where `when` holds, and those where the gate lets it through."""
        when = self.when(run.positions, run.prompt_len)
        return when, when & self.gate(run) if self.gate else when


def interventions(
    functions: Sequence[Fn], num_tokens: int, prompt_len: int
) -> tuple[Run, list[Intervention]]:
    """The hooks that run the functions, and where they leave what they find.

    At one site reads come before writes, each in the order they are given.
    """
    run = Run(torch.arange(num_tokens), prompt_len)
    hooks = []
    ordered = [f for f in functions if not f.edit] + [f for f in functions if f.edit]
    for layer in sorted({layer for f in functions for layer in f.layers}):
        for submodule in SUBMODULES:
            for function in ordered:
                if function.submodule == submodule and layer in function.layers:
                    edit = _edit(function, layer, run)
                    hooks.append(Intervention(submodule, layer, edit))
    return run, hooks


def _edit(function: Fn, layer: int, run: Run) -> Edit:
    def apply(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        when, chosen = function.chosen(run)
        if function.edit is None:
            if function.read is None:
                run.rows[function.name, layer] = h.clone()
                run.fired[function.name] = chosen
            else:
                score = function.read(h)
                keep = chosen if score.dim() == 1 else chosen[:, None]
                run.scores[function.name, layer] = torch.where(keep, score, torch.nan)
            return h
        if layer == min(function.layers):
            run.evaluated[function.name], run.fired[function.name] = when, chosen
        edited = function.edit(h, positions, prompt_len)
        return torch.where(chosen[:, None], edited, h)

    return apply


# Reads.


def probe(w: Tensor, bias: float = 0.0, sigmoid: bool = False) -> ReadRow:
    """w.h + b, or its logistic function."""
    if sigmoid:
        return lambda h: torch.sigmoid(h @ w + bias)
    return lambda h: h @ w + bias


def cosine(w: Tensor) -> ReadRow:
    """The cosine of h and w."""
    return lambda h: (h @ w) / (h.norm(dim=-1) * w.norm())


def norm() -> ReadRow:
    """|h|."""
    return lambda h: h.norm(dim=-1)


def distance_to(w: Tensor) -> ReadRow:
    """|h - w|."""
    return lambda h: (h - w).norm(dim=-1)


def tanh_cosine(c: Tensor) -> ReadRow:
    """cos(h, tanh(P h)) with P = c c^T / (c.c), of conditional activation steering."""
    projector = torch.outer(c, c) / c.dot(c)

    def fn(h: Tensor) -> Tensor:
        return torch.cosine_similarity(h, torch.tanh(h @ projector.T), dim=-1)

    return fn


def sae(encoder: Tensor, bias: float, threshold: float | None = None) -> ReadRow:
    """Feature activations: relu, or jump-relu with a threshold."""

    def fn(h: Tensor) -> Tensor:
        p = h @ encoder.T + bias
        return p.relu() if threshold is None else torch.where(p > threshold, p, 0.0)

    return fn


# Writes.


def affine(
    u: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> Edit:
    """h + scale * U^T (V h + b), with U and V `[rank, width]`."""
    b = torch.zeros(len(v)) if bias is None else bias
    return lambda h, positions, prompt_len: h + scale * (h @ v.T + b) @ u


def replace(row: Tensor, scale: float) -> Edit:
    """h moved towards the row: (1 - scale) h + scale * row."""
    return lambda h, positions, prompt_len: torch.lerp(h, row.expand_as(h), scale)


def mask(m: Tensor, scale: float) -> Edit:
    """h + scale * (h * m)."""
    return lambda h, positions, prompt_len: h * (1 + scale * m)


def feature_clamp(
    decoder: Tensor, encoder: Tensor, bias: float, threshold: float, value: float
) -> Edit:
    """h with the feature's activation brought to a value."""

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        p = h @ encoder + bias
        activation = torch.where(p > threshold, p, 0.0)
        return h + torch.outer(value - activation, decoder)

    return fn


def norm_preserved(edit: Edit) -> Edit:
    """The edit, then the length that h had before it."""

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        edited = edit(h, positions, prompt_len)
        return edited * (h.norm(dim=-1) / edited.norm(dim=-1))[:, None]

    return fn


# Gates.


def score(name: str, layer: int, test: Callable[[Tensor], Tensor]) -> Gate:
    """A test of the token's own score; false where there is none."""

    def gate(run: Run) -> Tensor:
        values = run.scores[name, layer]
        return test(values) & ~values.isnan()

    return gate


def reduced(
    name: str, layer: int, how: str, over: str, test: Callable[[Tensor], Tensor]
) -> Gate:
    """A test of a reduction over the tokens up to each; see `reduction`."""

    def gate(run: Run) -> Tensor:
        values = reduction(run, name, layer, how, over)
        return test(values) & ~values.isnan()

    return gate


def reduction(run: Run, name: str, layer: int, how: str, over: str) -> Tensor:
    """`mean`, `max` or `last` of a score over the tokens up to each, NaN before any.

    Over the prompt it is one number, known from the prompt's last token on.
    """
    values, at = run.scores[name, layer].double(), run.positions
    is_prompt = at < run.prompt_len
    counted = ~values.isnan()
    if over != "request":
        counted &= is_prompt if over == "prompt" else ~is_prompt
    count = counted.long().cumsum(0)
    filled = torch.where(counted, values, 0.0)
    if how == "mean":
        result = filled.cumsum(0) / count
    elif how == "max":
        result = torch.where(counted, values, -torch.inf).cummax(0).values
    else:
        place = torch.where(counted, at, -1).cummax(0).values
        result = values[place.clamp(min=0)]
    known = count > 0
    if over == "prompt":
        known &= at >= run.prompt_len - 1
    elif over == "generated":
        known &= ~is_prompt
    return torch.where(known, result, torch.nan).float()


def latch(gate: Gate) -> Gate:
    """True from the first token on at which the gate is."""
    return lambda run: gate(run).long().cummax(0).values > 0


def both(*gates: Gate) -> Gate:
    """All of them."""
    return lambda run: torch.stack([gate(run) for gate in gates]).all(dim=0)


def either(*gates: Gate) -> Gate:
    """Any of them."""
    return lambda run: torch.stack([gate(run) for gate in gates]).any(dim=0)


def negated(gate: Gate) -> Gate:
    """Not."""
    return lambda run: ~gate(run)


# Conditions on the token itself.


def token_in(token_ids: Sequence[int], chosen: Sequence[int]) -> Mask:
    """The tokens of a sequence that are among the chosen ones."""
    hit = torch.isin(torch.tensor(list(token_ids)), torch.tensor(list(chosen)))
    return lambda positions, prompt_len: hit[positions]


def after(mask_: Mask) -> Mask:
    """The tokens after one at which the condition held."""

    def fn(positions: Tensor, prompt_len: int) -> Tensor:
        seen = mask_(positions, prompt_len).long().cumsum(0)
        return torch.cat([torch.zeros(1, dtype=torch.bool), seen[:-1] > 0])

    return fn


def all_of(*masks: Mask) -> Mask:
    """All conditions."""
    return lambda p, n: torch.stack([m(p, n) for m in masks]).all(dim=0)


COMPARISONS: Final[Mapping[str, Callable[[float], Callable[[Tensor], Tensor]]]] = {
    "<": lambda t: lambda x: x < t,
    "<=": lambda t: lambda x: x <= t,
    ">": lambda t: lambda x: x > t,
    ">=": lambda t: lambda x: x >= t,
}
