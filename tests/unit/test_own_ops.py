"""Own ops of a deployment: modules, weights, and what of them is in the salt."""

import sys

import pytest
import torch

import eyesplice
from eyesplice import App, SpecError
from tests import deployment_world, user_ops
from tests.deployment_world import HIDDEN, LAYERS, all_armed, build

GOOD = ("userops::bend", user_ops.__name__)
ROWS = torch.arange(2.0 * HIDDEN).reshape(2, HIDDEN)
LAYERED = torch.arange(LAYERS * 3.0 * HIDDEN).reshape(LAYERS, 3, HIDDEN)


def saved(tmp_path, *functions, name="own", **tensors):
    App(name, list(functions), tensors).save(tmp_path / name)
    return str(tmp_path / name)


def own(op=GOOD[0], layers=1, submodule="residual.mid", **fields):
    return eyesplice.write(op, **fields).layers(layers).submodule(submodule)


def salt_of(config):
    return build(config).salt(deployment_world.vllm_config())


def test_each_op_gets_its_weight(tmp_path):
    folder = saved(
        tmp_path,
        own(weight="rows"),
        own(weight="layered", layers=[0, 2], submodule="mlp.post"),
        own("userops::drift", submodule="mlp.pre"),
        own(weight="one", submodule="mlp.pre"),
        rows=ROWS,
        layered=LAYERED,
        one=ROWS[1],
    )
    deployment = build({"apps": folder, "op_modules": [GOOD[1]]})
    places = [(str(c.site), c.op, c.rows) for c in deployment.custom]
    assert places == [
        ("residual.mid[1]", "userops::bend", 2),
        ("mlp.post[0]", "userops::bend", 3),
        ("mlp.post[2]", "userops::bend", 3),
        ("mlp.pre[1]", "userops::drift", 0),
        ("mlp.pre[1]", "userops::bend", 1),
    ]
    found = deployment.custom_weights(torch.device("cpu"))
    expected = [ROWS, LAYERED[0], LAYERED[2], torch.empty(0, HIDDEN), ROWS[1:]]
    for weight, rows in zip(found, expected, strict=True):
        assert torch.equal(weight, rows) and weight.is_contiguous()
    context = deployment.context(all_armed(deployment))
    assert context.custom is deployment.custom


def test_an_op_that_breaks_its_contract_is_found(tmp_path):
    folder = saved(tmp_path, own("userops::cleans_nan", weight="rows"), rows=ROWS)
    deployment = build({"apps": folder})
    with pytest.raises(SpecError, match="userops::cleans_nan"):
        deployment.custom_weights(torch.device("cpu"))


@pytest.mark.parametrize("op", ["nolib::op", "userops::absent"])
def test_an_op_that_is_not_registered_is_refused(op, tmp_path):
    with pytest.raises(SpecError, match=f"own/0.write .*{op}.*`op_modules`"):
        build({"apps": saved(tmp_path, own(op))})


def test_modules_are_imported_and_missing_ones_refused(tmp_path, monkeypatch):
    (tmp_path / "their_ops.py").write_text("raise RuntimeError('half a module')")
    (tmp_path / "my_ops_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    build({"op_modules": ["my_ops_here"]})
    assert "my_ops_here" in sys.modules
    for name, said in (("no_such_module", "No module"), ("their_ops", "half a module")):
        with pytest.raises(SpecError, match=rf"op_modules.*{name}.*PYTHONPATH.*{said}"):
            build({"op_modules": [name]})


def test_what_shapes_the_graph_is_in_the_salt(tmp_path, monkeypatch):
    module = tmp_path / "salted_ops.py"
    module.write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def salt(tensor=ROWS, modules=("salted_ops",), name="own", **fields):
        folder = saved(tmp_path, own(weight="t", **fields), name=name, t=tensor)
        return salt_of({"apps": folder, "op_modules": list(modules)})

    before = salt()
    assert salt() == salt(ROWS + 1) == salt(scale=2.0, name="renamed") == before
    changed = {
        salt(ROWS[:1]),
        salt(op="userops::mixes_rows"),
        salt(submodule="mlp.pre"),
        salt(layers=[1, 2]),
        salt(modules=()),
    }
    module.write_text("# another kernel\n")
    changed.add(salt())
    assert len(changed | {before}) == 7


def test_a_package_is_hashed_as_a_whole(tmp_path, monkeypatch):
    package = tmp_path / "packed_ops"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = salt_of({"op_modules": ["packed_ops"]})
    (package / "kernels.py").write_text("A = 2\n")
    assert salt_of({"op_modules": ["packed_ops"]}) != before


def test_an_app_file_cannot_name_modules(tmp_path):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "app.yaml").write_text("name: a\nop_modules: [os]\nfunctions: []\n")
    with pytest.raises(SpecError, match="op_modules"):
        eyesplice.load_app(folder)
