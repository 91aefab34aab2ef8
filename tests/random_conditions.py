"""The leaves of random conditions: texts with what they mean to hooks."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tests.functions import Run

Meaning = Callable[[Run], Tensor]
"""Bool `[tokens]`: where a condition or a gate is true."""


@dataclass(frozen=True)
class Text:
    """A condition or gate: its text, how tightly it binds, and its meaning."""

    text: str
    binds: int
    meaning: Meaning

    def within(self, binds: int) -> str:
        """The text as part of what binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"


NAMED: Final[dict[str, Meaning]] = {
    "all": lambda run: torch.ones_like(run.positions, dtype=torch.bool),
    "prompt": lambda run: run.positions < run.prompt_len,
    "generated": lambda run: run.positions >= run.prompt_len,
    "last_token": lambda run: run.positions == run.prompt_len - 1,
}


def positions(rng: random.Random) -> Text:
    """`positions` with one position, or with bounds or without."""
    a, b = (rng.choice((None, *range(-6, 14))) for _ in range(2))
    if a is not None and rng.random() < 0.3:
        return Text(
            f"positions({a})",
            4,
            lambda run: run.positions == (a if a >= 0 else a + run.prompt_len),
        )

    def meaning(run: Run) -> Tensor:
        start, stop = (
            default if n is None else n if n >= 0 else n + run.prompt_len
            for n, default in ((a, 0), (b, 10**6))
        )
        return (run.positions >= start) & (run.positions < stop)

    shown = ":".join("" if n is None else str(n) for n in (a, b))
    return Text(f"positions({shown})", 4, meaning)
