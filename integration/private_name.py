"""An entry of the ledger."""

import importlib
from dataclasses import dataclass
from typing import Any


class LedgerError(RuntimeError):
    """The installed vLLM no longer has a name that eyesplice needs."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One name of vLLM.

    Attributes:
        module: where it is defined.
        path: attribute path below the module.
        why: what eyesplice does with it.
        versions: where it was seen, and how it differs.
        when_gone: what to do when a version lacks it.
    """

    module: str
    path: str
    why: str
    versions: str
    when_gone: str

    @property
    def attribute(self) -> str:
        """The last part of the path: the attribute to replace on its owner."""
        return self.path.rsplit(".", 1)[-1]

    def owner(self) -> Any:
        """The object that has the attribute.

        Raises:
            LedgerError: this vLLM has no such name.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            for part in self.path.split(".")[:-1]:
                owner = getattr(owner, part)
            getattr(owner, self.attribute)
        except (ImportError, AttributeError) as error:
            raise LedgerError(
                f"this vLLM has no {self.module}.{self.path} ({error}); eyesplice "
                f"uses it as follows: {self.why}. Next step: {self.when_gone}"
            ) from error
        return owner

    def get(self) -> Any:
        """The named object itself."""
        return getattr(self.owner(), self.attribute)
