"""The command line without an engine: help, errors, tables, comparison, environment."""

import importlib.util
import math
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import eyesplice
from eyesplice import SpecError, __version__
from eyesplice.integration.cli import demo, inspect, jobs, launch, tables
from eyesplice.integration.cli.engine_options import in_one_line
from eyesplice.integration.cli.inspect import split
from eyesplice.integration.cli.jobs import GenerateJob, InspectJob
from eyesplice.integration.cli.launch import CommandError, engine, environment
from eyesplice.integration.cli.main import app
from eyesplice.integration.cli.proof import compare
from eyesplice.integration.cli.tables import SiteLine

INSPECT = InspectJob(model="m", dtype="auto", sites=("residual.post",), dump=None)
GENERATE = GenerateJob(
    model="m", prompt="p", chat=True, requests=(None, {}), max_tokens=3, vectors="v"
)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def text(renderable: object, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def site(
    layer: int, submodule: str, form: str | None = "fused", **fields: Any
) -> SiteLine:
    plain = {"alias": f"blocks.{layer}.hook_{submodule}", "node": "n", "reason": None}
    plain["shape"] = "[s72, 8]" if form else None
    return SiteLine(layer, submodule, form=form, **(plain | fields))


def said(tokens: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    return {"tokens": tokens, "logprobs": logprobs, "text": str(tokens)}


def test_importing_the_commands_loads_no_engine() -> None:
    root = Path(eyesplice.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "import eyesplice.integration.cli.main\n"
        "print([m for m in ('torch', 'transformers', 'triton', 'vllm') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_commands_are_those_of_this_version() -> None:
    names = {command.name for command in app.registered_commands}
    assert names == {"demo", "inspect", "serve", "version"}
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in names)
    assert run("bench").exit_code == 2


@pytest.mark.parametrize("name", ["demo", "inspect", "serve", "version"])
def test_each_command_has_help(name: str) -> None:
    shown = run(name, "--help")
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout


@pytest.mark.parametrize("words", ["version", "--version"])
def test_the_version_is_told(words: str) -> None:
    shown = run(words)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"eyesplice {__version__} (")


@pytest.mark.parametrize(
    "make, said_about_it",
    [
        (lambda folder: folder / "absent", "no such model folder"),
        (lambda folder: folder, "no config.json"),
    ],
)
def test_a_wrong_model_is_one_line(
    tmp_path: Path, make: Any, said_about_it: str
) -> None:
    if launch.engine_version() is None:
        pytest.skip("vLLM is not installed")
    done = run("inspect", "--json", "--model", str(make(tmp_path)))
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said_about_it in line


@pytest.mark.parametrize("words", [("demo",), ("inspect", "--model", "m")])
def test_without_vllm_the_extras_are_named(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    done = run(*words)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "eyesplice[gpu]" in line and "eyesplice[cpu]" in line


def test_a_dead_engine_leaves_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_MODULE", "eyesplice.no_such_module")
    with (
        engine(INSPECT, verbose=False) as process,
        pytest.raises(CommandError, match=r"ended with code 1[\s\S]*no_such_module"),
    ):
        process.result()


def test_leaving_the_context_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "_MODULE", "sleeper")
    with engine(INSPECT, verbose=False) as process:
        assert process._process.poll() is None
    assert process._process.poll() == -signal.SIGTERM


@pytest.mark.parametrize("job", [INSPECT, GENERATE])
def test_a_job_survives_the_journey(job: jobs.Job) -> None:
    assert jobs.from_json(jobs.to_json(job)) == job


def test_the_vanilla_engine_loads_no_plugin() -> None:
    vanilla = GenerateJob("m", "p", chat=False, requests=(), max_tokens=1, vectors=None)
    base = {"VLLM_PLUGINS": "eyesplice", "EYESPLICE_CONFIG": "mine.yaml"}
    assert environment(vanilla, base, verbose=False)["VLLM_PLUGINS"] == ""
    assert environment(GENERATE, base, verbose=False)["VLLM_PLUGINS"] == "eyesplice"
    assert "EYESPLICE_CONFIG" not in environment(GENERATE, base, verbose=False)


def test_a_dump_sees_a_cold_start(tmp_path: Path) -> None:
    cold = "VLLM_DISABLE_COMPILE_CACHE"
    dump = InspectJob("m", "auto", (), str(tmp_path), ("a",), ("mine",))
    assert jobs.from_json(jobs.to_json(dump)) == dump
    assert environment(dump, {}, verbose=False)[cold] == "1"
    assert cold not in environment(INSPECT, {}, verbose=False)


def test_a_users_variables_win_where_they_may() -> None:
    base = {"OMP_NUM_THREADS": "3", "VLLM_LOGGING_LEVEL": "DEBUG"}
    made = environment(GENERATE, base, verbose=False, sharing=2)
    assert base.items() <= made.items()
    assert made["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_refusal_inside_the_compiler_is_told_in_its_own_words() -> None:
    refusal = SpecError("site", "x", "others", "leave it out")
    wrapped = RuntimeError("backend failed")
    wrapped.inner_exception = refusal  # type: ignore[attr-defined]
    assert in_one_line(wrapped) == str(refusal)
    assert in_one_line(OSError("a\n  b")) == "OSError: a b"


def test_sites_are_split_at_commas() -> None:
    assert split(["a, b", "c", ","]) == ("a", "b", "c")


@pytest.mark.parametrize(
    "layers, shown",
    [([0], "0"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6], "0-1, 3, 5-6"), ([], "")],
)
def test_layers_are_shown_as_ranges(layers: list[int], shown: str) -> None:
    assert tables.ranges(layers) == shown


def test_alike_sites_are_one_group() -> None:
    lines = [
        line
        for layer in range(4)
        for line in (
            site(layer, "residual.pre"),
            site(layer, "router.logits", None, reason=f"hidden in layers.{layer}.moe"),
            site(layer, "mlp.post", "inline" if layer == 2 else "fused"),
        )
    ]
    shown = [(g.first.submodule, g.first.form, g.layers) for g in tables.groups(lines)]
    assert shown == [
        ("residual.pre", "fused", "0-3"),
        ("router.logits", None, "0-3"),
        ("mlp.post", "fused", "0-1, 3"),
        ("mlp.post", "inline", "2"),
    ]
    (note,) = tables.missing_notes(lines)
    assert note == "router.logits, layers 0-3: hidden in layers.0.moe"


def test_the_short_table_fits_a_terminal() -> None:
    longest = site(59, "attention.heads", alias="blocks.59.ln1.hook_normalized")
    shown = text(
        tables.short_table([longest, site(0, "mlp.post", shape="[s2, 16384]")])
    )
    assert "[tokens, 8]" in shown and "blocks.L.ln1.hook_normalized" in shown
    assert len(shown.splitlines()) == 3


def test_the_tables_show_ops_of_ones_own() -> None:
    lines = [site(i, "residual.post", custom=["my::op"] * (i == 1)) for i in range(3)]
    assert [(g.layers, tuple(g.first.custom)) for g in tables.groups(lines)] == [
        ("0, 2", ()),
        ("1", ("my::op",)),
    ]
    for table in (tables.short_table(lines), tables.full_table(lines)):
        assert text(table).count("fused + my::op") == 1
    found = {
        "sites": lines,
        "missing": 0,
        "ops": {"boundary": 3, "inline": 0, "hooks": 0},
    }
    assert "your own" not in tables.count_note(found)
    found["ops"] = {**found["ops"], "custom": 2}
    assert "with 2 ops of your own" in tables.count_note(found)


def test_the_full_table_has_every_site_and_reason() -> None:
    lines = [site(0, "mlp.pre", node="getitem"), site(1, "mlp.pre", None, node=None)]
    lines.append(site(2, "mlp.pre", None, node=None, reason="[no] such value"))
    shown = text(tables.full_table(lines), width=120)
    assert "mlp.pre[0]" in shown and "getitem" in shown and "[no] such value" in shown


def test_equal_generations_are_the_same() -> None:
    proof = compare(said([1, 2], [-0.5, -1.0]), said([1, 2], [-0.5, -1.25]))
    assert proof.same
    assert (proof.equal_tokens, proof.max_difference) == (2, 0.25)


@pytest.mark.parametrize(
    "theirs, equal", [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_other_generations_are_not(theirs: list[int], equal: int) -> None:
    proof = compare(said([1, 2, 3]), said(theirs))
    assert not proof.same
    assert proof.equal_tokens == equal


def test_nothing_proves_nothing() -> None:
    assert not compare(said([]), said([])).same


def test_a_difference_that_is_no_number_is_the_worst() -> None:
    proof = compare(said([1, 2], [-1.0, math.nan]), said([1, 2]))
    assert proof.max_difference == math.inf


PASSPORT: Mapping[str, Any] = {
    "demo": {
        "prompt": "Hello.",
        "chat_template": True,
        "vector": "sentiment",
        "layer": 10,
        "submodule": "residual.post",
        "scales": [1.0, -1.0],
        "ablate": {"layers": "all", "submodule": "residual.post", "scale": 1.0},
    }
}


def test_the_plan_has_a_plain_request_and_three_steered_ones() -> None:
    variants = demo.read_plan(PASSPORT).variants
    names = [variant.name for variant in variants]
    assert names == ["plain", "sentiment +1", "sentiment -1", "sentiment ablated"]
    assert variants[0].request is None
    assert variants[2].request == {
        "writes": [
            {
                "vector": "sentiment",
                "layers": [10],
                "submodule": "residual.post",
                "scale": -1.0,
            }
        ]
    }
    assert variants[3].request is not None
    assert variants[3].request["writes"][0]["write"] == "ablate"


def test_the_texts_stand_side_by_side_in_80_columns() -> None:
    plan = demo.read_plan(PASSPORT)
    outputs = [{"text": "wonderful [weather] " * 12}] * 4
    shown = text(demo.texts_table(plan, outputs, 80))
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shown.count("[weather]") == 48


@pytest.mark.parametrize(
    "theirs, vanilla_spliced, status",
    [([1, 2], False, 0), ([1, 3], False, 1), ([1, 2], True, 1)],
)
def test_the_demo_succeeds_only_with_the_proof(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    theirs: list[int],
    vanilla_spliced: bool,
    status: int,
) -> None:
    found = {
        "device": "cpu",
        "dtype": "float32",
        "spliced": True,
        "outputs": [said([1, 2])] * 4,
        "table": {
            "ops": {"boundary": 1, "inline": 0, "hooks": 0},
            "missing": 0,
            "sites": [asdict(site(0, "residual.pre"))],
        },
    }
    vanilla = {"spliced": vanilla_spliced, "outputs": [said(theirs)]}
    monkeypatch.setattr(demo, "require_engine", lambda: None)
    monkeypatch.setattr(demo, "_both", lambda *_: (found, vanilla))
    (tmp_path / "config.json").write_text("{}")
    done = run("demo", "--model", str(tmp_path))
    assert done.exit_code == status, done.output
    assert f"tokens equal: {2 if theirs == [1, 2] else 1} of 2" in done.stdout
    assert done.stderr.startswith("error: ") is bool(status)


def test_a_dump_needs_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inspect, "require_engine", lambda: None)
    done = run("inspect", "-m", "o/m", "--enforce-eager", "--dump", str(tmp_path))
    assert done.exit_code == 1
    assert "--enforce-eager makes none" in done.stderr
