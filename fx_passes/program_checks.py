"""What a lowered program says of its functions, and whether the engine has room for it."""

from collections.abc import Iterator

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.functions import Function
from eyesplice.fx_passes.program import (
    WRITE_OPCODES,
    Entry,
    FunctionInfo,
    Program,
)
from eyesplice.fx_passes.reads import Read
from eyesplice.fx_passes.sites import SUBMODULES, Site, Table
from eyesplice.ops.families import FAMILIES
from eyesplice.ops.layout import Family, Reduce, Scope


def function_info(name: str, function: Function, context: Context) -> FunctionInfo:
    """What answers say of a function."""
    read = function if isinstance(function, Read) else None
    top_k = 0
    if read and read.kernel == "router":
        top_k = read.top_k or context.experts_per_token
    return FunctionInfo(
        name=name,
        kind="read" if read else "write",
        kernel=function.kernel,
        layers=function.layers,
        submodule=function.submodule,
        app=function.app,
        gated=function.gate is not None,
        reduce=Reduce[read.reduce.upper()] if read else Reduce.NONE,
        over=read.scope if read else Scope.NONE,
        top_k=top_k,
    )


def check_family(entry: Entry, context: Context) -> None:
    """Refuse an entry whose op family is not compiled in.

    Raises:
        SpecError: naming the family as the configuration does.
    """
    missing = entry.family & ~context.families
    if not missing:
        return

    def names(families: Family) -> str:
        return ", ".join(name for name, one in FAMILIES.items() if one in families)

    raise SpecError(
        "request",
        f"one that needs the ops {names(missing)}",
        "the ops that are compiled into this engine: "
        + (names(context.families) or "none"),
        f"give `ops: [{names(context.families | missing)}]` in the configuration, "
        "a list that replaces the default, or leave out what needs them",
    )


def check_room(program: Program, context: Context) -> None:
    """Refuse a program with more entries in a table than there is room for.

    Raises:
        SpecError: naming the sites that share the table.
    """
    limit = context.max_entries
    for table, entries in program.tables.items():
        if len(entries) <= limit:
            continue
        writes = [entry.opcode in WRITE_OPCODES for entry in entries]
        kinds = [*(["writes"] * any(writes)), *(["reads"] * (not all(writes)))]
        shown = " and ".join(kinds)
        sites = ", ".join(map(str, _sites(table, context)))
        raise SpecError(
            f"{shown} at {sites}, which share one table:",
            f"{len(entries)} entries",
            f"at most {limit} per request (max_entries), gates counted",
            f"send fewer {shown} there, or raise `max_entries` in the configuration",
        )


def _sites(table: Table, context: Context) -> Iterator[Site]:
    """The sites whose entries the table holds."""
    for layer in range(max(0, table.layer - 1), table.layer + 1):
        for name in SUBMODULES:
            site = Site(layer, name)
            holds = context.custom.table_of(*site.table) == table
            if layer < context.num_layers and holds:
                yield site
