"""Times eyesplice's own host code inside an engine, vLLM's inside it taken out.

Every place where eyesplice wraps a method of vLLM's is a hook that calls the original.
The time of a hook is what it takes less what the original takes; hooks that hold another
hook keep its time out as well. It must be installed before the engine starts.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class HookClock:
    """Seconds of each hook since the last `take`, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        """Per hook that runs: seconds that belong to others."""

    def take(self) -> dict[str, float]:
        """Seconds by hook, and start again."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def clocked(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook `(original, *args) -> result`, timed as `name`."""

        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return hook(original, *args, **kwargs)
            return self._time(name, hook, self._outside(original), *args, **kwargs)

        return timed

    def whole(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of eyesplice's own that calls no original, timed as `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            return self._time(name, function, *args, **kwargs)

        return timed

    def _time(
        self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._inside.append(0.0)
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            taken = time.perf_counter() - start
            self._seconds[name] += taken - self._inside.pop()
            if self._inside:
                self._inside[-1] += taken

    def _outside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The original of a hook: its time is vLLM's."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            # A hook in it has taken its own part of this hook's time already.
            before = self._inside[-1]
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._inside[-1] = before + time.perf_counter() - start

        return outside


def install() -> HookClock:
    """Put a clock around every hook of engines that start in this process later."""
    from eyesplice.integration import plugin, results, runners

    clock = HookClock()
    wrap, around = plugin.wrap, runners._around

    def clocked_wrap(name: Any, hook: Callable[..., Any]) -> None:
        wrap(name, clock.clocked(name.attribute, hook))

    def clocked_around(runner: Any, name: Any, hook: Callable[..., Any]) -> None:
        around(runner, name, clock.clocked(name.attribute, hook))

    setattr(plugin, "wrap", clocked_wrap)  # noqa: B010  # mypy: module attributes
    setattr(runners, "_around", clocked_around)  # noqa: B010  # mypy, as above
    join = clock.whole("results: wait for copies", results.Pending.join)
    setattr(results.Pending, "join", join)  # noqa: B010  # mypy, as above
    return clock
