"""The one error a user of a request, a vector or an app can meet."""


class SpecError(ValueError):
    """A request, vector, app or configuration that cannot be served as written.

    The message names the thing, its value, what is allowed and the remedy. As a
    `ValueError` raised in the front end, vLLM's server answers it with HTTP 400.
    """

    def __init__(self, thing: str, value: object, allowed: str, remedy: str) -> None:
        self.thing = thing
        self.value = value
        self.allowed = allowed
        self.remedy = remedy
        shown = _shown(value)
        super().__init__(f"{thing} {shown} refused. Allowed: {allowed}. Do: {remedy}.")

    def __reduce__(self) -> tuple[type["SpecError"], tuple[str, object, str, str]]:
        return SpecError, (self.thing, self.value, self.allowed, self.remedy)


def _shown(value: object) -> str:
    """The value's repr, cut short; some values (ints of many digits) have none."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too large to show>"
    if len(shown) > 200:
        return f"{shown[:200]}... ({len(shown)} characters)"
    return shown
