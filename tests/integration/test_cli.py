"""The commands with real engines, each in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models

ROOT = Path(__file__).resolve().parents[2]
CLI = (sys.executable, "-m", "eyesplice.integration.cli.main")

pytestmark = pytest.mark.engine


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )


def only_config(name: str, folder: Path) -> str:
    made = tiny_models.make(name, folder)
    for file in made.glob("*.safetensors"):
        file.unlink()
    return str(made)


def forms(found: dict[str, Any]) -> dict[str, set[str]]:
    seen: dict[str, set[str]] = {}
    for site in found["sites"]:
        seen.setdefault(site["submodule"], set()).add(site["form"])
    return seen


@pytest.mark.parametrize(
    "name, op, form", [("llama", "boundary_", "fused"), ("gpt2", "inline_", "inline")]
)
def test_inspect_prints_json_and_dumps_both_graphs(
    tmp_path: Path, name: str, op: str, form: str
) -> None:
    model, dump = only_config(name, tmp_path / "model"), tmp_path / "dump"
    done = run("inspect", "--model", model, "--json", "--dump", str(dump))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == 0
    assert len(found["sites"]) == 8 * tiny_models.NUM_LAYERS
    assert forms(found)["residual.post"] == {form}
    assert forms(found)["attention.heads"] == {"inline"}
    assert found["sites"][0]["alias"] == "blocks.0.hook_resid_pre"

    files = {path.name: path.read_text() for path in dump.iterdir() if path.is_file()}
    before, after = files["graph_before.py"], files["graph_after.py"]
    spliced = f"torch.ops.eyesplice.{op}"
    assert "eyesplice.anchor" in before and spliced not in before
    assert "eyesplice.anchor" not in after and spliced in after
    added = [line for line in files["graph.diff"].splitlines() if line[:1] == "+"]
    assert sum(spliced in line for line in added) == after.count(spliced)
    assert json.loads(files["sites.json"])["sites"] == found["sites"]
    assert "eyesplice_own_0" in (dump / "compiled" / "transformed_code.py").read_text()


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_inspect_shows_a_model_without_a_graph(tmp_path: Path, name: str) -> None:
    model = only_config(name, tmp_path / "model")
    done = run("inspect", "--model", model, "--json", "--enforce-eager")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == 0
    assert set().union(*forms(found).values()) == {"module"}
    assert found["ops"]["hooks"] and not found["ops"]["boundary"]


def test_a_site_that_is_named_and_missing_is_an_error_after_the_table(
    tmp_path: Path,
) -> None:
    model = only_config("llama", tmp_path)
    done = run("inspect", "--model", model, "--sites", "router.logits,mlp.post")
    assert done.returncode == 1
    assert "router.logits" in done.stdout and "missing" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: site 'router.logits[0]' ")
    assert "Traceback" not in done.stderr


def test_the_demo_proves_that_the_plain_text_is_vanilla(smollm2: Path) -> None:
    done = run("demo", "--model", str(smollm2), "--max-tokens", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens equal: 12 of 12" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
