"""What the front end made of requests that come again: thousands ask for the same."""

import marshal
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.program import Program
from eyesplice.fx_passes.request import Request

KNOWN: Final = 1024
"""Requests that are kept."""

LONGEST: Final = 1 << 14
"""Bytes of what one asks for."""

_PLAIN: Final = 0
"""marshal's oldest format: equal values have equal bytes."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What a request asks for and becomes, whichever prompt it comes with.

    Attributes:
        text: the canonical one.
        request: parsed.
        program: lowered.
        changes_kv: as of the program, which looks through all its entries.
        vectors: digests of the registered vectors that it names itself.
    """

    text: str
    request: Request
    program: Program
    changes_kv: bool
    vectors: Mapping[str, str]


class KnownRequests:
    """Requests by what a client asked for, in the context of the day.

    Parsing and lowering take a millisecond or more, in which the server's event loop
    hands out no token of anyone.
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        self._found: OrderedDict[bytes, Lowered] = OrderedDict()
        # vLLM's `AsyncLLM` admits prompts that are text in threads.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, asked: bytes, context: Context) -> Lowered | None:
        """What is known of `asked_for` in this context."""
        with self._lock:
            if context is not self._context:
                self._context = context
                self._found.clear()
            found = self._found.get(asked)
            if found is not None:
                self._found.move_to_end(asked)
            return found

    def keep(self, asked: bytes, context: Context, lowered: Lowered) -> None:
        """Know it from now on, unless requests have another context by now."""
        with self._lock:
            if context is not self._context:
                return
            self._found[asked] = lowered
            if len(self._found) > KNOWN:
                self._found.popitem(last=False)


def asked_for(values: tuple[Any, ...]) -> bytes | None:
    """Bytes that are equal for equal values of equal types, `1` and `true` apart.

    Args:
        values: as they came: of any type and size.

    Returns:
        None for what is too long, too deep or not of plain types.
    """
    try:
        found = marshal.dumps(values, _PLAIN)
    except ValueError:
        return None
    return found if len(found) <= LONGEST else None
