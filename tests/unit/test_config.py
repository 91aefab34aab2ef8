import pytest

from eyesplice import SpecError
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site
from eyesplice.integration.config import FAMILIES, parse_config, requested
from eyesplice.ops.layout import ALL_FAMILIES, Family

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


@pytest.mark.parametrize(
    ("entry", "start"),
    [
        ("resid", "sites[1] 'resid' "),
        ("blocks.9.hook_mlp_out", "sites[1] 'blocks.9.hook_mlp_out' "),
        ({"submodule": "resid"}, "sites[1].submodule 'resid' "),
        ({"submodule": "mlp.pre", "layers": 9}, "sites[1].layers 9 "),
        (
            {"submodule": "blocks.9.hook_mlp_out"},
            "sites[1].submodule 'blocks.9.hook_mlp_out' ",
        ),
        ({"submodule": "mlp.pre", "depth": 1}, "sites[1] ['depth'] "),
        ({"submodule": "mlp.pre", "layers": None}, "sites[1].layers None "),
        (
            {"submodule": "blocks.2.hook_mlp_out", "layers": [1, 2]},
            "sites[1].layers [1, 2] ",
        ),
    ],
)
def test_a_malformed_site_is_named_as_it_was_written(entry, start):
    with pytest.raises(SpecError) as refused:
        wanted(["mlp.pre", entry])
    assert str(refused.value).startswith(start)


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


@pytest.mark.parametrize("key", ["dose", "h_norms"])
def test_what_this_version_lacks_is_refused_not_ignored(key):
    with pytest.raises(SpecError, match="no such feature"):
        parse_config({key: ["x"]})


def test_apps_and_defaults_are_one_or_several():
    assert parse_config({}).app_paths == parse_config({}).default_apps == ()
    config = parse_config({"apps": "folder", "default": "guarded"})
    assert (config.app_paths, config.default_apps) == (("folder",), ("guarded",))
    config = parse_config({"apps": ["a", "b"], "default": ["x", "y"]})
    assert (config.app_paths, config.default_apps) == (("a", "b"), ("x", "y"))
    assert parse_config(config.model_dump(exclude_defaults=True)) == config


def test_sites_that_apps_need_are_armed_unless_the_user_named_the_sites():
    needed = [Site(1, "attention.heads")]
    assert set(needed) <= parse_config({}).wanted(3, 0, needed)
    config = parse_config({"sites": ["residual.post"]})
    assert not set(needed) & config.wanted(3, 0, needed)


def test_what_the_apps_need_can_be_all_that_is_armed():
    config = parse_config({"sites": "apps"})
    needed = [Site(1, "attention.heads"), Site(0, "residual.post")]
    assert config.wanted(3, 0, needed) == {*needed, Site(1, "residual.pre")}
    assert not config.explicit_sites
    with pytest.raises(SpecError, match="apps that act somewhere"):
        config.wanted(3, 0)


def test_op_families():
    usual = Family.ADD | Family.RANK1 | Family.READ | Family.GATE | Family.CAPTURE
    assert parse_config({}).families() == usual
    assert parse_config({}).families(Family.ROUTER) == usual | Family.ROUTER
    assert parse_config({"ops": "all"}).families() == ALL_FAMILIES
    named = parse_config({"ops": ["mask", "preserve_norm"]})
    assert named.families(Family.ROUTER) == Family.MASK | Family.PRESERVE_NORM
    assert parse_config({"ops": list(FAMILIES)}).families() == ALL_FAMILIES


@pytest.mark.parametrize(
    "value",
    [
        {"apps": 3},
        {"apps": [1]},
        {"default": {}},
        {"ops": ["adds"]},
        {"ops": "add"},
        {"on_error": "ignore"},
        {"allow_registration": 1},
        {"max_scores": 0},
        {"capture_rows": "1"},
        {"token_sets": 5000},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_key(value):
    with pytest.raises(SpecError, match=f"configuration key {next(iter(value))}"):
        parse_config(value)
