"""Which deployed apps new requests can name, and which they get without naming one."""

import threading
from collections.abc import Sequence

from eyesplice._errors import SpecError


class AppSwitches:
    """The switch of each app of one engine; all are on when it starts.

    `disabled` is replaced and never edited, so that whoever reads it needs no lock.
    """

    def __init__(self, names: Sequence[str], default: Sequence[str]) -> None:
        self._names = tuple(names)
        self._default = tuple(default)
        self.disabled: frozenset[str] = frozenset()
        # The server switches apps in threads.
        self._lock = threading.Lock()

    @property
    def defaults(self) -> tuple[str, ...]:
        """The apps that a request gets now if it names none."""
        return tuple(name for name in self._default if name not in self.disabled)

    def enable(self, name: str) -> None:
        """Let new requests have the app.

        Raises:
            SpecError: no such app.
        """
        with self._lock:
            self.disabled -= {self._known(name)}

    def disable(self, name: str) -> None:
        """Keep the app from new requests.

        Raises:
            SpecError: no such app.
        """
        with self._lock:
            self.disabled |= {self._known(name)}

    def _known(self, name: str) -> str:
        if name in self._names:
            return name
        raise SpecError(
            "app",
            name,
            f"a deployed app: {', '.join(self._names) or 'none'}",
            "name one of them, or deploy it with the key `apps`",
        )
