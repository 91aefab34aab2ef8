"""Users' own ops of a deployment: where they come from, where they run, their weights."""

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from eyesplice._errors import SpecError
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.custom_ops import schema_of, verify
from eyesplice.fx_passes.custom_sites import CustomSite, CustomSites
from eyesplice.fx_passes.functions import sites_of
from eyesplice.fx_passes.kernels import is_own_op
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.sites import Site
from eyesplice.integration.config import KEY


def import_modules(names: Iterable[str]) -> None:
    """Import the modules that register the ops; safe to call again.

    The names come from the operator's configuration, never from an app or a request.

    Raises:
        SpecError: one that cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        # A module of one's own fails in its own way.
        except Exception as error:
            raise SpecError(
                "op_modules",
                name,
                "a module that every process of the engine can import",
                "install it or put its folder on PYTHONPATH "
                f"({type(error).__name__}: {error})",
            ) from error


def sources(names: Iterable[str]) -> str:
    """A hash of the modules' files, and of all Python files of those that are packages.

    What Inductor compiled of a kernel must not outlive a change of it.
    """
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        for file in _files(importlib.import_module(name)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(module: ModuleType) -> Iterator[Path]:
    for folder in getattr(module, "__path__", ()):
        yield from sorted(Path(folder).rglob("*.py"))
    file = getattr(module, "__file__", None)
    if file is not None and not hasattr(module, "__path__"):
        yield Path(file)


def custom_sites(apps: Iterable[str], context: Context) -> CustomSites:
    """Every own op of every deployed app, in the order of the apps and their functions.

    Args:
        apps: their names.
        context: what the model offers.

    Raises:
        SpecError: an app that this model cannot serve, or an op that is not registered.
    """
    found: list[CustomSite] = []
    for app in apps:
        request = parse_request({KEY: {"apps": {app: {}}}}, context)
        assert request is not None
        for write in request.writes:
            if not is_own_op(write.kernel):
                continue
            for site in sites_of(write):
                found.append(
                    CustomSite(
                        number=len(found),
                        site=site,
                        op=write.kernel,
                        schema=schema_of(write.kernel),
                        app=app,
                        weight=write.weight,
                        rows=_rows(write.weight, site, context),
                    )
                )
    return CustomSites(tuple(found))


def _rows(weight: str | None, site: Site, context: Context) -> int:
    return 0 if weight is None else context.vectors.rows(weight, site.layer)[1]


def weights(
    custom: CustomSites, context: Context, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The weight of each op on the device: `[rows, width]`, contiguous."""
    found = []
    for one in custom:
        width = context.widths[one.site.submodule]
        rows = torch.empty(0, width)
        if one.weight is not None:
            tensor = context.vectors.tensor(one.weight)
            per_layer = tensor[one.site.layer] if tensor.dim() == 3 else tensor
            rows = per_layer.reshape(one.rows, width)
        found.append(rows.to(device, dtype, copy=True).contiguous())
    return found


def verify_all(custom: CustomSites, weights: Iterable[Tensor]) -> None:
    """Refuse ops that touch what they must not.

    Raises:
        SpecError: naming the op and what it did.
    """
    seen = set()
    for one, weight in zip(custom, weights, strict=True):
        key = one.op, weight.shape
        if key not in seen:
            verify(one.op, weight, weight.dtype)
        seen.add(key)
