"""Device memory that eyesplice takes, by table and in all, beside a vanilla engine."""

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks.bench import Bench
from eyesplice.benchmarks.records import Refused

_SLACK: Final = 1 << 20
"""Bytes by which the allocator may round a table up: it splits no smaller rest off."""

_MIB: Final = 2**20

SUMS: Final = (
    "sum",
    "measured",
    "user_tensors",
    "sum_without_user_tensors",
    "engine_allocated",
)
"""Keys of a record besides the tables', in the order of the page; None on a CPU."""


def run(bench: Bench) -> dict[str, Any]:
    """Take the sizes from a pair of engines and write the record.

    Raises:
        Refused: the device's memory grew by something else than the tables.
    """
    pair = bench.pair()
    sizes = memory_of(pair.spliced.ready, pair.vanilla.ready)
    record = {"max_num_seqs": bench.arguments()["max_num_seqs"], **sizes}
    bench.write("memory", record)
    print_sizes(bench.console, record)
    return record


def memory_of(spliced: Mapping[str, Any], vanilla: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in bytes, from what two engines say of themselves.

    Args:
        spliced: of the engine with tables.
        vanilla: of vanilla vLLM with the same arguments.

    Returns:
        `tables` by name ("words": what lies between the parts of the common
        allocation), their sum, what the allocator gave for them (None on a CPU),
        the rows of the bank that hold the user's own tensors, the sum without those, and
        how much more the whole engine has allocated than vanilla.

    Raises:
        Refused: see `run`.
    """
    tables = dict(spliced["tables"])
    total = sum(tables.values())
    measured = spliced["tables_measured"]
    if not total or total != spliced["table_bytes"]:
        raise Refused(
            f"no numbers: tables of {total} and {spliced['table_bytes']} bytes"
        )
    if measured is not None and not total <= measured <= total + len(tables) * _SLACK:
        raise Refused(
            f"no numbers: the tables have {total} bytes, and device memory grew by "
            f"{measured} when they were allocated"
        )
    own = spliced["bank_rows_used"] * spliced["bank_row_bytes"]
    return {
        "tables": dict(sorted(tables.items(), key=lambda item: -item[1])),
        "sum": total,
        "measured": measured,
        "user_tensors": own,
        "sum_without_user_tensors": total - own,
        "engine_allocated": _more("allocated_bytes", spliced, vanilla),
    }


def _more(
    key: str, spliced: Mapping[str, Any], vanilla: Mapping[str, Any]
) -> int | None:
    if spliced[key] is None or vanilla[key] is None:
        return None
    return int(spliced[key]) - int(vanilla[key])


def print_sizes(console: Console, record: Mapping[str, Any]) -> None:
    """The table of sizes in MiB."""
    requests = record["max_num_seqs"]
    table = Table(title=f"device memory, {requests} requests at most: MiB")
    table.add_column("what")
    table.add_column("MiB", justify="right")
    for name, size in record["tables"].items():
        table.add_row(name, f"{size / _MIB:.3f}")
    for key in SUMS:
        size = record[key]
        text = "not on a CPU" if size is None else f"{size / _MIB:.3f}"
        table.add_row(key.replace("_", " "), text)
    console.print(table)
