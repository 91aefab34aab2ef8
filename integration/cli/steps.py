"""Shows which long step is running and for how long, on stderr."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def step(console: Console, text: str, *, quiet: bool = False) -> Iterator[None]:
    """Announce a step, count its seconds, and leave one line when it is done.

    Args:
        console: where to show it; a terminal gets a moving line.
        text: what is being done.
        quiet: leave no line behind.
    """
    began = time.monotonic()
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield
    else:
        if not quiet:
            console.print(f"{text} ...")
        yield
    if not quiet:
        console.print(f"{text}: {time.monotonic() - began:.0f} s", style="dim")
