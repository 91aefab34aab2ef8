"""What the cases of one `eyesplice bench` share: options, vectors, and engines.

Engines stay up from one case to the next, so that a chain of cases pays for one start.
"""

import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from eyesplice.benchmarks import lending, records
from eyesplice.benchmarks.engines import EngineProcess
from eyesplice.benchmarks.records import Refused
from eyesplice.benchmarks.shapes import Shape

VANILLA: Final = "vanilla"
"""The case, or row, of vLLM without eyesplice."""

VECTORS: Final = 256
"""Vectors of every engine, v0, v1, ...: one for each program of a full batch."""

VECTOR_SIZE: Final = 1e-6
"""Their standard deviation: a stream of dummy weights (6e-4) hardly changes. What the
multiplied numbers are changes the speed of large GEMMs, which is no cost of ours."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 256,
    # A fixed cache instead of memory profiling: both engines start at once.
    "kv_cache_memory_bytes": 16 << 30,
    "gpu_memory_utilization": 0.1,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}


@dataclass(slots=True)
class Pair:
    """Vanilla vLLM and eyesplice with the same arguments, both serving."""

    vanilla: EngineProcess
    spliced: EngineProcess

    def of(self, case: str) -> EngineProcess:
        """The engine that runs a case."""
        return self.vanilla if case == VANILLA else self.spliced

    def ready(self) -> dict[str, Any]:
        """What both say of themselves."""
        return {"vanilla": self.vanilla.ready, "eyesplice": self.spliced.ready}

    def close(self) -> None:
        """Stop both, the one that borrows memory first."""
        self.spliced.close()
        self.vanilla.close()


@dataclass(slots=True, kw_only=True)
class Bench:
    """Options of all cases, and the engines that are up.

    Attributes:
        out: folder of records and logs.
        model: a model folder, where the case needs one.
        load_format: vLLM's.
        rounds: counted rounds.
        engine: further arguments of `vllm.LLM`, which replace the defaults.
        console: for progress and tables.
    """

    out: Path
    console: Console
    model: Path | None = None
    load_format: str = "dummy"
    rounds: int = 7
    engine: Mapping[str, Any] = field(default_factory=dict)
    _pairs: dict[str, Pair] = field(default_factory=dict)
    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def require_model(self) -> Path:
        """The model's folder.

        Raises:
            Refused: none was given, or it has no `config.json`.
        """
        if self.model is None:
            raise Refused(
                "this case needs a model: eyesplice bench --model FOLDER CASE"
            )
        if not (self.model / "config.json").exists():
            raise Refused(f"{self.model} has no config.json")
        return self.model

    def shape(self) -> Shape:
        """Sizes of the model."""
        return Shape.of(self.require_model())

    def arguments(self) -> dict[str, Any]:
        """Arguments of both engines of a pair."""
        model = {"model": str(self.require_model()), "load_format": self.load_format}
        return {**_DEFAULTS, **model, **self.engine}

    def scratch(self) -> Path:
        """A folder of this run's, made at the first call."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="eyesplice-bench-")
        return Path(self._scratch.name)

    def vectors(self) -> Path:
        """A folder of random vectors of the model's size, made at the first call."""
        folder = self.scratch() / "vectors"
        if not folder.exists():
            folder.mkdir()
            _save_vectors(folder, self.shape().hidden)
        return folder

    def start(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        plugin: bool = False,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> EngineProcess:
        """Start an engine without waiting for it.

        Args:
            name: of its log.
            config: eyesplice's configuration, besides the vectors; None for none.
            plugin: whether plugins load though eyesplice is not switched on.
            env: further environment variables.
            more: arguments of `vllm.LLM` that replace the pair's.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        arguments = {**self.arguments(), **more}
        if config is not None:
            own = {"vectors": str(self.vectors()), **config}
            arguments["additional_config"] = {"eyesplice": own}
        return EngineProcess(
            name,
            self.out / f"{name}.log",
            plugin=plugin or config is not None,
            env=dict(env or {}),
            **arguments,
        )

    def pair(
        self,
        name: str = "pair",
        *,
        clock: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> Pair:
        """Both engines, started at once, or those that an earlier case left up.

        Args:
            name: pairs of one name are the same.
            clock: whether eyesplice's hooks are timed.
            arguments: of both engines, which replace the default ones.
            config: eyesplice's configuration, besides the vectors.

        Raises:
            Refused: one that does not start.
        """
        if name not in self._pairs:
            # One GPU has no room for the pairs of several configurations.
            self.close()
            self.console.print(f"starting 2 engines of {self.require_model().name} ...")
            more = dict(arguments or {})
            lend, borrow = self._same_memory(name, more)
            own = more | ({"clock_hooks": True} if clock else {})
            made = Pair(
                self.start(f"{name}-vanilla", env=lend, **more),
                self.start(f"{name}-eyesplice", config=config, env=borrow, **own),
            )
            self._pairs[name] = made
            try:
                for one in (made.vanilla, made.spliced):
                    one.wait()
                    seconds = one.ready["seconds"]
                    self.console.print(f"{one.name} serves after {seconds:.0f} s")
            except RuntimeError as error:
                raise Refused(str(error)) from error
        return self._pairs[name]

    def _same_memory(
        self, name: str, arguments: dict[str, Any]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Environments of a pair that shares weights and cache; empty on a CPU."""
        if not lending.can_lend():
            return {}, {}
        folder = self.scratch() / f"memory-{name}"
        folder.mkdir()
        arguments["worker_cls"] = lending.WORKER
        lend, borrow = (lending.variables(folder, role) for role in ("lend", "borrow"))
        return lend, borrow

    def turns(self, cases: Iterable[str], what: str = "") -> Iterator[tuple[int, str]]:
        """(round, case): every case once a round, each round in another order.

        The first round, -1, warms up. The end of each is printed.

        Args:
            cases: their names.
            what: is measured, for the console.
        """
        before = f"{what}: " if what else ""
        names = list(cases)
        for number in range(-1, self.rounds):
            order = names.copy()
            random.Random(number).shuffle(order)
            yield from ((number, name) for name in order)
            self.console.print(f"{before}round {number + 1} of {self.rounds}")

    def write(self, case: str, record: Mapping[str, Any]) -> Path:
        """Write the record of a case as `CASE-MODEL.json`.

        Args:
            case: its name.
            record: its numbers, to which machine and options are added.
        """
        path = self.out / f"{case}-{self.require_model().name}.json"
        noted = {
            "case": case,
            "model": self.require_model().name,
            "load_format": self.load_format,
            "engine": {k: v for k, v in self.arguments().items() if k != "model"},
            "machine": records.machine(),
        }
        records.write(path, noted | dict(record))
        self.console.print(f"written: {path}")
        return path

    def close(self) -> None:
        """Stop the engines that are up."""
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()


def _save_vectors(folder: Path, hidden: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    for i in range(VECTORS):
        vector = VECTOR_SIZE * torch.randn(hidden, generator=generator)
        save_file({f"v{i}": vector}, folder / f"v{i}.safetensors")
