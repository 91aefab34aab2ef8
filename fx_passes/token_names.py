"""The token sets that a condition can name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eyesplice.fx_passes.context import TokenSet
from eyesplice.ops.layout import INT32_MAX


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What `token_in` can name.

    Attributes:
        sets: named token sets; None takes any name for one.
        app: the app whose sets are named without its name in front.
        vocab_size: token ids are smaller than this.
    """

    sets: Mapping[str, TokenSet] | None = field(default_factory=dict)
    app: str | None = None
    vocab_size: int = INT32_MAX

    def full(self, name: str) -> str | None:
        """The name in `sets` that `name` stands for, None if there is none."""
        if self.sets is None:
            return name
        own = name if self.app is None else f"{self.app}/{name}"
        return next((n for n in (own, name) if n in self.sets), None)
