"""The serving protocol: `vllm bench serve` against two servers that take turns.

250 ShareGPT prompts, Poisson arrivals, 128 output tokens: mean and P99 latency between
tokens, mean time to the first one, and throughput. All apps are deployed on one server
and switched by the request, so one start serves every row. Each server first serves a run
that does not count. In each round vanilla and every row run once, in another order; a
row's ratio is to vanilla's run of that round.
"""

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from eyesplice.benchmarks import lending, records
from eyesplice.benchmarks.bench import VANILLA
from eyesplice.benchmarks.intervals import against, percent, summary
from eyesplice.benchmarks.records import Refused
from eyesplice.benchmarks.serve_check import check
from eyesplice.benchmarks.serve_client import ServeClient
from eyesplice.benchmarks.servers import Server
from eyesplice.benchmarks.shapes import Shape, lend_tokenizer, shallow_copy
from eyesplice.benchmarks.sharegpt import write_subset

IDLE: Final = "idle"
ALL: Final = "all"
METRICS: Final = {
    "mean_itl_ms": "mean ITL, ms",
    "p99_itl_ms": "P99 ITL, ms",
    "mean_ttft_ms": "mean TTFT, ms",
    "total_token_throughput": "tokens/s",
}
"""Keys of `vllm bench serve`'s result, as the table calls them."""

_NAME: Final = "bench"
_WARM_PROMPTS: Final = 32
_SUBSET: Final = 4
"""Conversations kept per prompt: a sample passes over those of unfit lengths."""

_MODEL_LEN: Final = 2048
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one sitting measures.

    Attributes:
        model: a model folder; `config.json` alone does with `load_format` "dummy".
        dataset: a ShareGPT file, which may be cut off mid-record.
        tokenizer: a folder whose tokenizer a model without one borrows.
        rows: "idle", names of packs, "all"; empty for every one.
        prompts: requests of a run.
        output_tokens: of each request.
        rate: requests per second, Poisson arrivals.
        runs: counted runs of each row.
        layers: decoder layers that are kept of the model, None for all.
        load_format: vLLM's.
        cache_bytes: of each server's KV cache.
        tensor_parallel: ranks of each server.
        wait: seconds that a start may take.
        server_options: further options of both servers.
    """

    model: Path
    dataset: Path
    tokenizer: Path | None = None
    rows: tuple[str, ...] = ()
    prompts: int = 250
    output_tokens: int = 128
    rate: float = 10.0
    runs: int = 3
    layers: int | None = None
    load_format: str = "dummy"
    cache_bytes: int = 16 << 30
    tensor_parallel: int = 1
    wait: float = 600.0
    server_options: tuple[str, ...] = ()

    def noted(self) -> dict[str, Any]:
        """The settings as the record has them."""
        found = {k: v for k, v in asdict(self).items() if k not in ("wait", "rows")}
        found |= {"model": self.model.name, "dataset": self.dataset.name}
        found["tokenizer"] = self.tokenizer and self.tokenizer.name
        found["server_options"] = list(self.server_options)
        return found | {"seed": _SEED, "prefix_caching": False}


@dataclass(slots=True)
class Sitting:
    """The servers of one sitting, and what they were asked."""

    settings: Settings
    folder: Path
    rows: Mapping[str, Any]
    servers: dict[str, Server]
    client: ServeClient
    dataset: dict[str, Any]
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def run(self, row: str, prompts: int, rate: float) -> dict[str, Any]:
        """One run of `vllm bench serve`.

        Raises:
            Refused: a request failed.
        """
        server = self.servers[VANILLA if row == VANILLA else IDLE]
        found = self.client.run(self._arguments(server, row, prompts, rate))
        if found["completed"] != prompts:
            raise Refused(
                f"{row}: {found['completed']} of {prompts} requests completed"
            )
        return found

    def _arguments(
        self, server: Server, row: str, prompts: int, rate: float
    ) -> list[str]:
        body = self.rows.get(row)
        extra = ["--extra-body", json.dumps(body)] if body else []
        return [
            *("--backend", "openai", "--base-url", server.url, "--model", _NAME),
            *("--tokenizer", str(self.folder / "model")),
            *("--dataset-name", "sharegpt", "--seed", str(_SEED)),
            *("--dataset-path", str(self.folder / "sharegpt.json")),
            *("--sharegpt-output-len", str(self.settings.output_tokens)),
            *("--num-prompts", str(prompts), "--request-rate", str(rate)),
            *("--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "99"),
            *extra,
        ]


def run(settings: Settings, out: Path, console: Console) -> dict[str, Any]:
    """Measure the rows and merge them into the record of the model.

    Args:
        settings: of this sitting.
        out: folder of records and logs; the record is `serve-MODEL.json`.
        console: for progress.

    Returns:
        The whole record, rows of earlier sittings included.

    Raises:
        Refused: a server that does not start, a failed check or a failed request.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eyesplice-serve-") as name:
        sitting = _open(settings, Path(name), out, console)
        try:
            return _measure(sitting, out / f"serve-{settings.model.name}.json", console)
        finally:
            sitting.client.close()
            for server in reversed(sitting.servers.values()):
                server.close()


def _open(settings: Settings, folder: Path, out: Path, console: Console) -> Sitting:
    from eyesplice.benchmarks.seven_apps import seven_apps

    model = shallow_copy(settings.model, folder / "model", settings.layers)
    shape = Shape.of(model)
    if settings.tokenizer is not None:
        lend_tokenizer(settings.tokenizer, model, shape.vocab)
    keep = _SUBSET * settings.prompts
    dataset = write_subset(settings.dataset, folder / "sharegpt.json", keep)
    # Neither random weights nor a borrowed tokenizer give ids a meaning.
    meaningless = settings.load_format == "dummy" or settings.tokenizer is not None
    apps = seven_apps(shape, meaningless_ids=meaningless)
    for app_name, app in apps.items():
        app.save(folder / "apps" / app_name)
    bodies = row_bodies(list(apps))
    wanted = settings.rows or tuple(bodies)
    if unknown := set(wanted) - set(bodies):
        raise Refused(
            f"no such rows: {', '.join(sorted(unknown))}; "
            f"{settings.model.name} has {', '.join(bodies)}"
        )
    console.print(f"starting 2 servers of {settings.model.name} ...")
    memory = folder / "memory"
    memory.mkdir()
    servers = {
        name: Server(
            name,
            command,
            out / f"serve-{name}.log",
            {"VLLM_PLUGINS": plugins, **lending.variables(memory, role)},
        )
        for name, command, plugins, role in (
            (VANILLA, _command(settings, model, None), "", "lend"),
            (IDLE, _command(settings, model, folder / "apps"), "eyesplice", "borrow"),
        )
    }
    client = ServeClient(out / "serve-client.log")
    rows = {row: bodies[row] for row in wanted}
    sitting = Sitting(settings, folder, rows, servers, client, dataset)
    try:
        for server in servers.values():
            server.wait(settings.wait)
            console.print(f"{server.name} serves after {server.seconds:.0f} s")
    except Refused:
        client.close()
        for server in reversed(servers.values()):
            server.close()
        raise
    return sitting


def row_bodies(apps: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """What each row adds to the body of its requests.

    Args:
        apps: names of the deployed apps.
    """
    every: dict[str, Any] = {"apps": {name: {} for name in apps}}
    specs = {**{name: name for name in apps}, ALL: json.dumps(every)}
    bodies = {row: {"vllm_xargs": {"eyesplice": text}} for row, text in specs.items()}
    return {IDLE: None, **bodies}


def _command(settings: Settings, model: Path, apps: Path | None) -> list[str]:
    """The command line of a server; `apps` holds a folder per app, None for vanilla."""
    from eyesplice.integration.cli.serve import own_part, server_command

    length = min(_MODEL_LEN, Shape.of(model).positions)
    options = [
        *("--served-model-name", _NAME, "--load-format", settings.load_format),
        *("--max-model-len", str(length), "--max-num-seqs", "256", "--seed", "0"),
        # A fixed cache instead of memory profiling: both servers start at once.
        *("--kv-cache-memory-bytes", str(settings.cache_bytes)),
        *("--gpu-memory-utilization", "0.1"),
        # Every run sends the same prompts.
        "--no-enable-prefix-caching",
        *("--tensor-parallel-size", str(settings.tensor_parallel)),
        *settings.server_options,
    ]
    if lending.can_lend():
        options += ["--worker-cls", lending.WORKER]
    if apps is None:
        server = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-P", "-m", server, "--model", str(model), *options]
    own = own_part(sorted(apps.iterdir()), None, ())
    return server_command(str(model), own, options)


def _measure(sitting: Sitting, path: Path, console: Console) -> dict[str, Any]:
    settings = sitting.settings
    shape = Shape.of(sitting.folder / "model")
    found = check(sitting.servers, _NAME, sitting.rows, shape.vocab)
    console.print(
        f"check passed: {found['equal']} of {found['prompts']} idle texts equal "
        f"vanilla's, {len(found['acted'])} rows acted"
    )
    order = [VANILLA, *sitting.rows]
    for row in order:
        sitting.run(row, min(_WARM_PROMPTS, settings.prompts), float("inf"))
    for row in order[:2]:
        # Of each server: steps of sizes that a burst does not have compile kernels too,
        # those of mixtures for half a second each.
        sitting.run(row, settings.prompts, settings.rate)
    sitting.runs = {row: [] for row in order}
    earlier = records.read(path)
    record: dict[str, Any] = {}
    for number in range(settings.runs):
        random.Random(number).shuffle(order)
        for row in order:
            result = sitting.run(row, settings.prompts, settings.rate)
            sitting.runs[row].append(result)
            console.print(
                f"run {number + 1} of {settings.runs}, {row}: "
                f"mean ITL {result['mean_itl_ms']:.3f} ms"
            )
        # A sitting that is cut short keeps its whole rounds.
        record = merged(
            earlier, settings.model.name, _noted(sitting, found), sitting.runs
        )
        records.write(path, record)
    return record


def _noted(sitting: Sitting, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": records.machine(),
        "settings": sitting.settings.noted(),
        "dataset": sitting.dataset,
        "start_seconds": {name: s.seconds for name, s in sitting.servers.items()},
        "borrowed": lending.borrowed(sitting.folder / "memory"),
        "check": checked,
    }


def merged(
    earlier: Mapping[str, Any] | None,
    model: str,
    sitting: Mapping[str, Any],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """The record with one more sitting, whose rows replace earlier ones of their name.

    Args:
        earlier: the record so far.
        model: its name.
        sitting: what to note of it.
        runs: results of `vllm bench serve` by row, vanilla's among them, round by round.
    """
    sittings = [*(earlier or {}).get("sittings", ()), dict(sitting)]
    rows = dict((earlier or {}).get("rows", {}))
    for row, results in runs.items():
        if row != VANILLA:
            metrics = {key: _compared(key, results, runs[VANILLA]) for key in METRICS}
            rows[row] = {"sitting": len(sittings) - 1, "metrics": metrics}
    return {"case": "serve", "model": model, "sittings": sittings, "rows": rows}


def _compared(
    key: str,
    results: Sequence[Mapping[str, Any]],
    vanilla: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    values, base = ([float(r[key]) for r in side] for side in (results, vanilla))
    return {"row": summary(values), VANILLA: summary(base), **against(values, base)}


def print_record(record: Mapping[str, Any], console: Console) -> None:
    """The table of `rows_of`."""
    table = Table(title=f"vllm bench serve, {record['model']}: median (to vanilla)")
    for column in ("row", "sitting", *METRICS.values()):
        table.add_column(column, justify="left" if column == "row" else "right")
    for cells in rows_of(record):
        table.add_row(*cells)
    console.print(table)


def rows_of(record: Mapping[str, Any]) -> list[list[str]]:
    """Cells of every row: name, sitting, and each median with its ratio to vanilla's.

    Vanilla's own medians stand before the first row of their sitting.
    """
    rows: list[list[str]] = []
    seen: set[str] = set()
    for row, found in record["rows"].items():
        sitting, metrics = str(found["sitting"] + 1), found["metrics"].values()
        if sitting not in seen:
            medians = (f"{metric[VANILLA]['median']:.2f}" for metric in metrics)
            rows.append([VANILLA, sitting, *medians])
            seen.add(sitting)
        cells = (
            f"{metric['row']['median']:.2f} ({percent(metric)})" for metric in metrics
        )
        rows.append([row, sitting, *cells])
    return rows
