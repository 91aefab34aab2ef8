"""Whose function an entry states: a client's own, or an app's."""

from dataclasses import dataclass
from typing import Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import TokenNames
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.kernels import TENSOR_FIELDS
from eyesplice.fx_passes.models import FunctionModel
from eyesplice.fx_passes.places import check_printable


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an entry comes from, which says what its names mean.

    Attributes:
        app: the app whose function it is, None for a request's own.
        index: its index in the app; None for an entry whose names are full already.
    """

    app: str | None = None
    index: int | None = None

    def name(self, name: str | None) -> str | None:
        """The function's name in answers, None for the request's own without one."""
        if self.app is None or self.index is None:
            return name
        return f"{self.app}/{self.index if name is None else name}"

    def token_names(self, context: Context) -> TokenNames:
        """The token sets that its conditions can name."""
        app = None if self.index is None else self.app
        return TokenNames(context.token_sets, app, context.vocab_size)

    def tensors(
        self, model: FunctionModel, own: tuple[str, ...], value: object
    ) -> dict[str, str]:
        """The registered name of each tensor that the kernel takes, by field.

        An app's tensor that is not named is the one of the field's own name.

        Args:
            model: the entry.
            own: the kernel's fields.
            value: the entry as it was sent, for the error.

        Raises:
            SpecError: a tensor of a request's own function is not named.
        """
        found: dict[str, str] = {}
        for field in (*TENSOR_FIELDS, "bias"):
            name = getattr(model, field, None)
            if field not in own or (field == "bias" and not isinstance(name, str)):
                continue
            check_printable(field, name)
            if self.app is not None and self.index is not None:
                name = f"{self.app}/{name or field}"
            if name is None:
                raise SpecError(
                    "", value, f"an object with the key {field}", f"add {field}"
                )
            found[field] = name
        return found


OWN: Final = Origin()
