"""A running engine's apps, sites and vectors, and the switch of each app."""

from dataclasses import dataclass
from typing import Any

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import VectorInfo
from eyesplice.fx_passes.report import SiteRow
from eyesplice.integration.frontend import FrontEnd, front_end_of


@dataclass(frozen=True, slots=True)
class AppStatus:
    """A deployed app.

    Attributes:
        name: the name that requests use.
        enabled: whether requests can name it now.
        default: whether requests that name no app get it, while it is enabled.
        functions: the names of its functions, as answers have them.
        digest: hash of its functions, token sets and tensors.
    """

    name: str
    enabled: bool
    default: bool
    functions: tuple[str, ...]
    digest: str


class Deployed:
    """What one engine has deployed, seen from the process that its requests enter."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    def apps(self) -> tuple[AppStatus, ...]:
        """The deployed apps, in the order of the configuration."""
        deployment = self._front_end.deployment
        return tuple(
            AppStatus(
                name=name,
                enabled=self._front_end.is_enabled(name),
                default=name in deployment.config.default_apps,
                functions=deployment.needs.functions[name],
                digest=deployment.apps[name].digest,
            )
            for name in deployment.apps.names
        )

    def enable(self, name: str) -> None:
        """Let new requests name the app again.

        Raises:
            SpecError: no such app.
        """
        self._front_end.enable(name)

    def disable(self, name: str) -> None:
        """Refuse the app to new requests; those that run keep it.

        A default app is no longer applied either.

        Raises:
            SpecError: no such app.
        """
        self._front_end.disable(name)

    def sites(self) -> tuple[SiteRow, ...]:
        """The site table: each site's form, or why it is missing."""
        return self._front_end.deployment.read_report().rows

    def vectors(self) -> tuple[VectorInfo, ...]:
        """The registered vectors, then the tensors of apps, as `app/tensor`."""
        registry = self._front_end.deployment.registry
        found = (registry.info(name) for name in registry.names())
        return tuple(info for info in found if info is not None)

    def bank_use(self) -> tuple[int, int]:
        """Rows of the bank that are taken, and rows that there are."""
        deployment = self._front_end.deployment
        return len(deployment.registry.bank), deployment.config.bank_rows

    @property
    def allows_registration(self) -> bool:
        """Whether the configuration allows registration over HTTP."""
        return self._front_end.deployment.config.allow_registration


def deployed(engine: Any) -> Deployed:
    """What a running engine has deployed.

    Args:
        engine: a `vllm.LLM`, or an engine (`AsyncLLM`, `LLMEngine`).

    Raises:
        SpecError: not an engine of this process, or one without eyesplice.
    """
    inner = getattr(engine, "llm_engine", engine)
    front_end = front_end_of(getattr(inner, "input_processor", None))
    if front_end is None or not front_end.switched_on:
        raise SpecError(
            "engine",
            type(engine).__name__,
            "a vllm.LLM or an engine that runs with eyesplice switched on",
            "start it with additional_config={'eyesplice': {}}",
        )
    return Deployed(front_end)
