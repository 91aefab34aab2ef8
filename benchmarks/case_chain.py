"""A command line of several cases, each with options of its own."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from typer.core import TyperGroup

_LATER: Final = "eyesplice.bench.later"


class CaseChain(TyperGroup):
    """Runs several cases one after another, each with the options behind its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        shared, *cases = split_cases(args, self.list_commands(ctx))
        ctx.meta[_LATER] = cases[1:]
        found: list[str] = super().parse_args(ctx, shared + (cases[0] if cases else []))
        return found

    def invoke(self, ctx: Any) -> Any:
        # Before the first case runs: it takes minutes until a later one's turn comes.
        later = [self._later(ctx, *case) for case in ctx.meta[_LATER]]
        result = super().invoke(ctx)
        for command, inner in later:
            with inner:
                result = command.invoke(inner)
        return result

    def _later(self, ctx: Any, name: str, *args: str) -> tuple[Any, Any]:
        command = self.get_command(ctx, name)
        assert command is not None
        return command, command.make_context(name, list(args), parent=ctx)


def split_cases(args: Sequence[str], names: Collection[str]) -> list[list[str]]:
    """The options before the first case, then each case's name and options.

    Args:
        args: of the command line. No option of a case is a flag, so a word behind an
            option is its value.
        names: of all cases.
    """
    parts: list[list[str]] = [[]]
    is_value = False
    for word in args:
        if word in names and not is_value:
            parts.append([])
        parts[-1].append(word)
        is_value = word.startswith("--") and "=" not in word and word != "--help"
    return parts
