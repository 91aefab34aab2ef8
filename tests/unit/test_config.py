import pytest

from eyesplice import SpecError
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site
from eyesplice.integration.config import parse_config, requested

FLAG = {"post_grad_custom_post_pass": "eyesplice.splice_pass"}


def wanted(sites, num_layers=3, num_experts=0):
    config = parse_config({} if sites is None else {"sites": sites})
    return config.wanted(num_layers, num_experts)


def test_the_default_is_every_value_of_every_boundary():
    assert wanted(None) == {Site(n, s) for n in range(3) for s in BOUNDARY_SUBMODULES}


def test_all_includes_the_router_only_where_there_are_experts():
    assert Site(0, "router.logits") not in wanted("all")
    assert Site(0, "router.logits") in wanted("all", num_experts=4)
    assert Site(2, "attention.heads") in wanted("all")


def test_one_value_with_two_names_is_armed_under_both():
    assert wanted([{"submodule": "residual.post", "layers": 0}]) == {
        Site(0, "residual.post"),
        Site(1, "residual.pre"),
    }
    assert wanted(["blocks.2.hook_resid_pre"]) == {
        Site(2, "residual.pre"),
        Site(1, "residual.post"),
    }
    assert wanted(["blocks.2.hook_resid_post"]) == {Site(2, "residual.post")}


@pytest.mark.parametrize(
    "sites",
    [
        [],
        [3],
        ["hook_mlp_out"],
        [{"submodule": "mlp.pre", "layers": []}],
        [{"submodule": "mlp.pre", "layers": 9}],
        [{"submodule": "mlp.pre", "depth": 1}],
        [{}],
        "mlp.pre",
    ],
)
def test_malformed_sites_are_refused(sites):
    with pytest.raises(SpecError):
        wanted(sites)


def test_nothing_switches_it_on_but_a_request_to(monkeypatch):
    monkeypatch.delenv("EYESPLICE_CONFIG", raising=False)
    assert requested({}, {}) is None
    assert requested({"other": 1}, {"joint_custom_pre_pass": "x.y"}) is None
    assert requested({}, FLAG) == parse_config({})
    assert requested({"eyesplice": {}}, {}) == parse_config({})


def test_the_file_is_overridden_key_by_key(monkeypatch, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("max_entries: 3\nbank_rows: 9\n")
    monkeypatch.setenv("EYESPLICE_CONFIG", str(file))
    config = requested({"eyesplice": {"bank_rows": 11}}, {})
    assert (config.max_entries, config.bank_rows) == (3, 11)
    file.write_text("")
    assert requested({}, {}) == parse_config({})


@pytest.mark.parametrize(
    "text", ["- a", "1", "a: [1", "unknown: 1", "max_entries: '8'"]
)
def test_a_malformed_file_is_refused(monkeypatch, tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    monkeypatch.setenv("EYESPLICE_CONFIG", str(file))
    with pytest.raises(SpecError):
        requested({}, {})


@pytest.mark.parametrize("key", ["apps", "default", "dose", "h_norms"])
def test_what_this_version_lacks_is_refused_not_ignored(key):
    with pytest.raises(SpecError, match="no such feature"):
        parse_config({key: ["x"]})
