"""What one engine deploys, rebuilt alike in every process from its `VllmConfig`."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.custom_sites import NO_CUSTOM_SITES, CustomSites
from eyesplice.fx_passes.plan import salt
from eyesplice.fx_passes.report import SpliceReport
from eyesplice.fx_passes.sites import Site
from eyesplice.integration import own_ops
from eyesplice.integration.app_registry import AppRegistry, Needs, TokenSets
from eyesplice.integration.buffers import BufferSizes
from eyesplice.integration.config import (
    KEY,
    EyespliceConfig,
    every_site,
    parse_config,
)
from eyesplice.integration.deployed_files import Latest, content_key
from eyesplice.integration.shape import ModelShape
from eyesplice.integration.vectors import VectorRegistry
from eyesplice.ops.layout import ALL_FAMILIES, Family

_CAPTURE_BYTES: Final = 8 * 2**20
_MOST_CAPTURE_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's configuration, model sizes, vectors and apps.

    Attributes:
        config: the user's configuration, with its salt.
        shape: sizes of the model.
        dtype: the model's dtype.
        registry: the vectors and the apps' tensors.
        apps: the apps.
        token_sets: the apps' token sets.
        needs: what the apps need of the engine.
        wanted: the sites to arm.
        families: the op families to compile in.
        custom: the users' own ops of the apps.
    """

    config: EyespliceConfig
    shape: ModelShape
    dtype: torch.dtype
    registry: VectorRegistry
    apps: AppRegistry
    token_sets: TokenSets
    needs: Needs
    wanted: frozenset[Site]
    families: Family
    custom: CustomSites = NO_CUSTOM_SITES

    @classmethod
    def of(cls, vllm_config: Any) -> "Deployment | None":
        """The deployment of an engine, None when eyesplice is not switched on.

        Raises:
            SpecError: as `build`.
        """
        config = switched_on(vllm_config)
        return None if config is None else cls.build(config, vllm_config)

    @classmethod
    def build(cls, config: EyespliceConfig, vllm_config: Any) -> "Deployment":
        """The deployment that a configuration describes, the caller's own.

        It is made once in a process as long as the files hold the same.

        Raises:
            SpecError: vectors or apps that cannot be registered or served.
        """
        own_ops.import_modules(config.op_modules)
        shape, model = ModelShape.of(vllm_config), vllm_config.model_config
        key = content_key(config, shape, model)
        made = _latest.get(key, lambda: cls._make(config, vllm_config))
        return replace(
            made,
            config=config,
            registry=made.registry.copy(),
            apps=AppRegistry(made.apps),
            token_sets=made.token_sets.copy(),
        )

    @classmethod
    def _make(cls, config: EyespliceConfig, vllm_config: Any) -> "Deployment":
        shape, model = ModelShape.of(vllm_config), vllm_config.model_config
        apps = AppRegistry.load(config.app_paths)
        apps.check_defaults(config.default_apps)
        registry = VectorRegistry(
            model.dtype, _bank_width(config, shape, apps), config.bank_rows
        )
        registry.load_folder(config.vectors)
        apps.register(registry)
        token_sets = TokenSets.resolve(
            apps.token_sets(), config.token_sets, shape.vocab_size, model
        )
        # Whatever the apps use is there, until it is known what that is.
        anything = cls(
            config=config,
            shape=shape,
            dtype=model.dtype,
            registry=registry,
            apps=apps,
            token_sets=token_sets,
            needs=Needs(),
            wanted=every_site(shape.num_layers, shape.num_experts),
            families=ALL_FAMILIES,
        )
        context = anything._context(dict.fromkeys(anything.wanted))
        custom = own_ops.custom_sites(apps.names, context)
        anything = replace(anything, custom=custom)
        needs = Needs.of(apps, replace(context, custom=custom))
        registry.freeze()
        found = replace(
            anything,
            needs=needs,
            wanted=config.wanted(shape.num_layers, shape.num_experts, needs.sites),
            families=config.families(needs.families),
        )
        # The user may have left out a site or an op that an app needs.
        Needs.of(apps, found._context(dict.fromkeys(found.wanted)))
        return found

    def context(self, report: SpliceReport, disabled: Iterable[str] = ()) -> Context:
        """What requests can name, given what the pass armed.

        Args:
            report: the site table.
            disabled: apps that new requests cannot name.
        """
        armed = {row.site: row.reason for row in report.rows}
        return self._context(armed, frozenset(disabled))

    def _context(
        self, armed: Mapping[Site, str | None], disabled: frozenset[str] = frozenset()
    ) -> Context:
        config, shape = self.config, self.shape
        return Context(
            num_layers=shape.num_layers,
            armed=armed,
            vectors=self.registry,
            max_entries=config.max_entries,
            widths=shape.widths(),
            max_scores=config.max_scores,
            vocab_size=shape.vocab_size,
            families=self.families,
            token_sets=self.token_sets.named(),
            apps=self.apps.deployed(disabled),
            default_apps=config.default_apps,
            num_experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
            custom=self.custom,
        )

    def custom_weights(self, device: torch.device) -> list[Tensor]:
        """The weights of the users' own ops, which are seen to keep their contract.

        Raises:
            SpecError: an op that does not.
        """
        context = self._context({})
        found = own_ops.weights(self.custom, context, self.dtype, device)
        own_ops.verify_all(self.custom, found)
        return found

    def token_set_rows(self) -> Tensor:
        """int32 `[token_sets, ceil(vocabulary / 32)]` on the CPU, a bit per token id."""
        return self.token_sets.rows()

    @property
    def bank_shape(self) -> tuple[int, int]:
        """Rows of the bank, and elements of each."""
        return self.config.bank_rows, self.registry.bank.shape[1]

    @property
    def capture_rows(self) -> int:
        """Rows of the capture buffer.

        Unless the configuration says otherwise, as many as 8 MiB hold, but no fewer than
        let two prompts that end in one step be captured at every layer while two of the
        step before are copied.
        """
        if self.config.capture_rows is not None:
            return self.config.capture_rows
        row_bytes = self.bank_shape[1] * self.dtype.itemsize
        fitting = min(_CAPTURE_BYTES // row_bytes, _MOST_CAPTURE_ROWS)
        return max(fitting, 4 * self.shape.num_layers)

    def buffer_sizes(self, vllm_config: Any) -> BufferSizes:
        """What the tables of a worker have room for."""
        config, scheduler = self.config, vllm_config.scheduler_config
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        return BufferSizes(
            tokens=max(scheduler.max_num_batched_tokens, captured),
            requests=scheduler.max_num_seqs,
            entries=config.max_entries,
            bank_rows=config.bank_rows,
            width=self.bank_shape[1],
            scores=config.max_scores,
            capture_rows=self.capture_rows,
            token_sets=config.token_sets,
            vocab_size=self.shape.vocab_size,
        )

    @property
    def report_path(self) -> Path:
        """Where the workers leave the site table for the front end."""
        return report_path(self.config)

    def salt(self, vllm_config: Any) -> str:
        """A hash of what shapes the graph and the buffers, and of no tensor's values."""
        config, model = self.config, vllm_config.model_config
        sizes = (
            *(int(self.families), config.max_entries, config.max_scores),
            *(*self.bank_shape, self.capture_rows, config.token_sets),
        )
        return salt(
            [
                ",".join(str(site) for site in sorted(self.wanted)),
                str(sizes),
                str((self.shape, model.dtype, vllm_config.compilation_config.mode)),
                str(vllm_config.parallel_config.tensor_parallel_size),
                str(vllm_config.scheduler_config.max_num_seqs),
                model.hf_config.to_json_string(use_diff=False),
                torch.__version__,
                str([custom.shape for custom in self.custom]),
                own_ops.sources(config.op_modules),
            ]
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


_latest: Final = Latest[Deployment]()


def switched_on(vllm_config: Any) -> EyespliceConfig | None:
    """The engine's configuration if the plugin has activated it, else None."""
    additional = vllm_config.additional_config
    value = additional.get(KEY) if isinstance(additional, dict) else None
    return parse_config(value) if value is not None else None


def compiles(vllm_config: Any) -> bool:
    """Whether vLLM compiles the model into a graph, which the pass then splices."""
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    return mode not in (None, CompilationMode.NONE)


def _bank_width(config: EyespliceConfig, shape: ModelShape, apps: AppRegistry) -> int:
    """Elements per bank row: the widest value that a program can act on."""
    widths = shape.widths()
    submodules = set(apps.submodules())
    if config.sites != "apps":
        wanted = config.wanted(shape.num_layers, shape.num_experts)
        submodules |= {site.submodule for site in wanted}
    return max([shape.hidden_size, *(widths[name] for name in submodules)])


def report_path(config: EyespliceConfig) -> Path:
    """Where the site table lies: beside vLLM's compile cache, by salt."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / KEY / f"{config.salt}.json"
