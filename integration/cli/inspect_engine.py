"""The engine's side of `eyesplice inspect`: the site table and the graphs of a model."""

import difflib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyesplice._version import __version__
from eyesplice.fx_passes.report import SpliceReport
from eyesplice.fx_passes.sites import SUBMODULES
from eyesplice.integration import session
from eyesplice.integration.cli.engine_options import engine_options
from eyesplice.integration.cli.jobs import InspectJob
from eyesplice.integration.plugin import register


def inspect_model(job: InspectJob, found: dict[str, Any]) -> None:
    """Start an engine with dummy weights and note what the pass made of its graph.

    Args:
        job: model, sites and the folder of the dump.
        found: filled in; holds the table even when the engine then refuses to start
            because a site that was named is missing.
    """
    import vllm

    register()
    found |= {"model": job.model, "eyesplice": __version__, "vllm": vllm.__version__}
    options = engine_options(job.model)
    if job.eager:
        options |= {"enforce_eager": True, "compilation_config": {}}
    if job.dump is not None:
        session.keep_graphs()
    with _compiled_code(job.dump, options):
        try:
            engine = vllm.LLM(
                **options,
                dtype=job.dtype,
                load_format="dummy",
                skip_tokenizer_init=True,
                additional_config={"eyesplice": _config(job)},
            )
            config = engine.llm_engine.vllm_config
            found["dtype"] = str(config.model_config.dtype).removeprefix("torch.")
            found["device"] = config.device_config.device_type
        finally:
            _note(job, found)


def _config(job: InspectJob) -> dict[str, Any]:
    config: dict[str, Any] = {"sites": list(job.sites) or "all"}
    if job.apps:
        config["apps"] = list(job.apps)
    if job.op_modules:
        config["op_modules"] = list(job.op_modules)
    return config


def describe(report: SpliceReport) -> dict[str, Any]:
    """The report as plain data, sites in the order of the forward pass."""
    rows = sorted(
        report.rows,
        key=lambda row: (row.site.layer, SUBMODULES.index(row.site.submodule)),
    )
    sites = [
        {
            "layer": row.site.layer,
            "submodule": row.site.submodule,
            "alias": row.site.alias,
            "form": row.form,
            "node": row.node or None,
            "shape": row.shape or None,
            "reason": row.reason,
            "custom": list(row.custom),
        }
        for row in rows
    ]
    return {"ops": report.counts, "missing": len(report.missing), "sites": sites}


def _note(job: InspectJob, found: dict[str, Any]) -> None:
    if not session.is_open():
        return
    current = session.current_session()
    if current.report is None:
        return
    found |= describe(current.report)
    if job.dump is not None:
        folder = Path(job.dump)
        (folder / "sites.json").write_text(json.dumps(found, indent=1) + "\n")
        _dump_graphs(current.before, current.after, folder)


def _dump_graphs(before: str, after: str, folder: Path) -> None:
    names = ("graph_before.py", "graph_after.py")
    (folder / names[0]).write_text(before)
    (folder / names[1]).write_text(after)
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    diff = difflib.unified_diff(old, new, *names)
    (folder / "graph.diff").write_text("".join(diff))


@contextmanager
def _compiled_code(dump: str | None, options: dict[str, Any]) -> Iterator[None]:
    """Let vLLM write the compiled code through depyf, and keep it under `compiled`."""
    if dump is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="eyesplice-") as scratch:
        compilation = options.setdefault("compilation_config", {})
        # Without its compiler vLLM does not make the folder that it writes to.
        (Path(scratch) / "rank_0_dp_0").mkdir()
        compilation["debug_dump_path"] = scratch
        yield
        folder = Path(dump) / "compiled"
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(scratch).rglob("*.py")):
            shutil.copy(file, folder / file.name)
