"""What one engine deploys, rebuilt alike in every process from its `VllmConfig`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.plan import salt
from eyesplice.fx_passes.report import SpliceReport
from eyesplice.fx_passes.sites import Site
from eyesplice.integration.config import KEY, EyespliceConfig, parse_config
from eyesplice.integration.shape import ModelShape
from eyesplice.integration.vectors import VectorRegistry


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's configuration, model sizes and vectors.

    Attributes:
        config: the user's configuration, with its salt.
        shape: sizes of the model.
        dtype: the model's dtype.
        registry: the vectors.
        report_path: where the workers leave the site table for the front end.
    """

    config: EyespliceConfig
    shape: ModelShape
    dtype: torch.dtype
    registry: VectorRegistry
    report_path: Path

    @classmethod
    def of(cls, vllm_config: Any) -> "Deployment | None":
        """The deployment of an engine, None when eyesplice is not switched on.

        Raises:
            SpecError: a vector folder that cannot be registered.
        """
        config = switched_on(vllm_config)
        if config is None:
            return None
        shape = ModelShape.of(vllm_config)
        dtype = vllm_config.model_config.dtype
        registry = VectorRegistry(dtype, bank_width(config, shape), config.bank_rows)
        registry.load_folder(config.vectors)
        return cls(config, shape, dtype, registry, report_path(config))

    def context(self, report: SpliceReport) -> Context:
        """What requests can name, given what the pass armed."""
        armed: dict[Site, str | None] = {row.site: row.reason for row in report.rows}
        return Context(
            num_layers=self.shape.num_layers,
            armed=armed,
            vectors=self.registry,
            max_entries=self.config.max_entries,
            widths=self.shape.widths(),
        )

    def read_report(self) -> SpliceReport:
        """The site table that the workers left.

        Raises:
            SpecError: they left none.
        """
        try:
            return SpliceReport.from_json(self.report_path.read_text())
        except (OSError, ValueError, KeyError) as error:
            raise SpecError(
                "site table",
                str(self.report_path),
                "the file that the engine writes when it starts",
                "run the engine and the front end on one machine with one "
                "VLLM_CACHE_ROOT, and restart the engine",
            ) from error

    def write_report(self, report: SpliceReport) -> None:
        """Leave the site table for the front end and for warm starts, atomically.

        Raises:
            SpecError: it cannot be written.
        """
        temporary = self.report_path.with_suffix(f".{os.getpid()}")
        try:
            self.report_path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(report.to_json())
            temporary.replace(self.report_path)
        except OSError as error:
            raise SpecError(
                "VLLM_CACHE_ROOT",
                str(self.report_path.parent),
                "a folder that the engine can write to",
                f"point VLLM_CACHE_ROOT at one ({error})",
            ) from error


def switched_on(vllm_config: Any) -> EyespliceConfig | None:
    """The engine's configuration if the plugin has activated it, else None."""
    additional = vllm_config.additional_config
    value = additional.get(KEY) if isinstance(additional, dict) else None
    return parse_config(value) if value is not None else None


def bank_width(config: EyespliceConfig, shape: ModelShape) -> int:
    """Elements per bank row: the widest value that a program can act on."""
    wanted = config.wanted(shape.num_layers, shape.num_experts)
    widths = shape.widths()
    return max([shape.hidden_size, *(widths[site.submodule] for site in wanted)])


def deployment_salt(config: EyespliceConfig, vllm_config: Any) -> str:
    """A hash of what shapes the graph and the buffers, and of no vector's values."""
    shape = ModelShape.of(vllm_config)
    wanted = config.wanted(shape.num_layers, shape.num_experts)
    model = vllm_config.model_config
    return salt(
        [
            ",".join(str(site) for site in sorted(wanted)),
            str((config.ops, config.max_entries, config.bank_rows)),
            str((shape, model.dtype, vllm_config.compilation_config.mode)),
            str(vllm_config.parallel_config.tensor_parallel_size),
            str(vllm_config.scheduler_config.max_num_seqs),
            model.hf_config.to_json_string(use_diff=False),
            torch.__version__,
        ]
    )


def report_path(config: EyespliceConfig) -> Path:
    """Where the site table lies: beside vLLM's compile cache, by salt."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / KEY / f"{config.salt}.json"
