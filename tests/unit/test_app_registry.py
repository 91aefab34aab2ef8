"""The apps of a deployment, for a stand-in of a model."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import eyesplice
from eyesplice import App, SpecError
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site
from eyesplice.integration.app_registry import AppRegistry, TokenSets
from eyesplice.integration.default_apps import AppSwitches
from eyesplice.integration.vectors import VectorRegistry
from eyesplice.ops.layout import Family
from tests.deployment_world import (
    EXPERTS,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    all_armed,
    build,
    steer,
    vllm_config,
)

NO_TOKENIZER = SimpleNamespace(skip_tokenizer_init=True)


@pytest.fixture
def saved(tmp_path):
    """Saves apps; returns their folders."""

    def save(*apps):
        folders = []
        for app in apps:
            app.save(tmp_path / app.name)
            folders.append(str(tmp_path / app.name))
        return folders

    return save


def test_apps_become_part_of_the_bank_and_of_what_requests_see(saved):
    apps = steer("b"), steer("a", seed=1)
    deployment = build({"apps": saved(*apps), "default": "a"})
    assert deployment.apps.names == ("b", "a")
    assert deployment.registry.names() == ["a/v", "b/v"]
    row = deployment.registry.row("b/v", 0)
    assert torch.equal(deployment.registry.bank[row], apps[0].tensors["v"])
    context = deployment.context(all_armed(deployment))
    assert set(context.apps) == {"a", "b"} and context.apps["a"].enabled
    assert context.default_apps == ("a",)
    assert context.vocab_size == VOCABULARY
    assert deployment.needs.functions == {"b": ("b/0",), "a": ("a/0",)}
    context = deployment.context(all_armed(deployment), disabled=["a"])
    assert not context.apps["a"].enabled and context.apps["b"].enabled


def test_a_disabled_default_app_is_passed_over(saved):
    folders = saved(steer("a"), steer("b", seed=1))
    deployment = build({"apps": folders, "default": ["a", "b"]})

    def applied(*disabled):
        context = deployment.context(all_armed(deployment), disabled)
        found = parse_request(None, context)
        return None if found is None else found.apps

    assert applied() == ("a", "b")
    assert applied("a") == ("b",)
    assert applied("a", "b") is None


def test_equal_configurations_give_equal_tables(saved):
    folders = saved(steer("b"), steer("a", seed=1))
    one, two = build({"apps": folders}), build({"apps": folders})
    assert torch.equal(one.registry.bank, two.registry.bank)
    assert one.salt(vllm_config()) == two.salt(vllm_config())


def test_what_an_app_needs_is_armed_and_compiled_in(saved):
    heads = App(
        "heads",
        [
            eyesplice.write("mask", vector="m", preserve_norm=False)
            .layers([0, 2])
            .submodule("attention.heads")
        ],
        {"m": torch.ones(HEADS)},
    )
    plain, deployment = build({}), build({"apps": saved(heads)})
    needed = {Site(0, "attention.heads"), Site(2, "attention.heads")}
    assert deployment.needs.sites == needed
    assert deployment.wanted - plain.wanted == needed
    assert deployment.families == plain.families | Family.MASK
    assert (plain.bank_shape[1], deployment.bank_shape[1]) == (HIDDEN, HEADS)
    assert plain.salt(vllm_config()) != deployment.salt(vllm_config())


def test_what_apps_need_can_be_all_that_is_armed(saved):
    deployment = build({"apps": saved(steer()), "sites": "apps"})
    assert deployment.wanted == {Site(1, "residual.post"), Site(2, "residual.pre")}
    assert deployment.bank_shape[1] == HIDDEN
    with pytest.raises(SpecError, match="deploy an app"):
        build({"sites": "apps"})


def test_values_of_tensors_are_no_part_of_the_salt(saved):
    salts = {
        build({"apps": saved(steer(seed=seed))}).salt(vllm_config())
        for seed in range(2)
    }
    assert len(salts) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ops", "all"),
        ("max_entries", 9),
        ("max_scores", 9),
        ("bank_rows", 9),
        ("capture_rows", 9),
        ("token_sets", 9),
        ("sites", "all"),
    ],
)
def test_sizes_and_ops_are_part_of_the_salt(key, value):
    plain = build({}).salt(vllm_config())
    assert build({key: value}).salt(vllm_config()) != plain


def test_what_the_user_left_out_is_missed_at_the_start(saved):
    folders = saved(steer())
    with pytest.raises(SpecError, match="add"):
        build({"apps": folders, "ops": ["rank1"]})
    with pytest.raises(SpecError, match=r"residual\.post"):
        build({"apps": folders, "sites": ["attention.post"]})


def test_an_app_that_the_model_cannot_serve_is_refused(saved):
    far = App(
        "far",
        [eyesplice.write("steering_vector", vector="v").layers(LAYERS)],
        {"v": torch.ones(HIDDEN)},
    )
    with pytest.raises(SpecError, match="4"):
        build({"apps": saved(far)})
    wide = App(
        "wide",
        [eyesplice.write("steering_vector", vector="v").layers(0)],
        {"v": torch.ones(HIDDEN - 1)},
    )
    with pytest.raises(SpecError, match="wide/v"):
        build({"apps": saved(wide)})


def test_two_apps_of_one_name_and_unknown_defaults_are_refused(saved, tmp_path):
    steer("a").save(tmp_path / "x")
    with pytest.raises(SpecError, match="one app of each name"):
        AppRegistry.load([*saved(steer("a")), str(tmp_path / "x")])
    with pytest.raises(SpecError, match="deployed apps: a"):
        build({"apps": saved(steer("a")), "default": "b"})
    with pytest.raises(SpecError, match="each app once"):
        build({"apps": saved(steer("a")), "default": ["a", "a"]})


def test_no_room_in_the_bank_names_the_tensor(saved):
    with pytest.raises(SpecError, match=r"b/v.*raise bank_rows"):
        build({"apps": saved(steer("a"), steer("b")), "bank_rows": 2})


def router_app(**lists):
    return App("route", [eyesplice.write("router", **lists).layers([0, 1])])


def test_masks_of_routers_get_rows_at_the_start(saved):
    folders = saved(router_app(activate=[1], deactivate=[0, 3]))
    deployment = build({"apps": folders}, experts=EXPERTS)
    row = deployment.registry.mask_row((1,), (0, 3))
    assert deployment.registry.bank[row, :EXPERTS].tolist() == [-1, 1, 0, -1]
    assert len(deployment.registry.bank) == row + 1 == 2
    assert deployment.families & Family.ROUTER
    with pytest.raises(SpecError, match="masks of the deployed apps"):
        deployment.registry.mask_row((2,), ())
    with pytest.raises(SpecError):
        build({"apps": folders})


def test_router_layers_are_armed_where_apps_act_or_where_sites_name_them(saved):
    def routers(**config):
        wanted = build({"apps": folders, **config}, experts=EXPERTS).wanted
        return sorted(s.layer for s in wanted if s.submodule == "router.logits")

    folders = saved(router_app(activate=[1]))
    assert routers() == [0, 1]
    assert routers(sites=[*BOUNDARY_SUBMODULES, "router.logits"]) == [0, 1, 2, 3]
    some = {"submodule": "router.logits", "layers": "0-2"}
    assert routers(sites=["residual.post", some]) == [0, 1, 2]
    assert routers(sites="all") == [0, 1, 2, 3]


def test_the_sites_that_the_docs_name_are_the_default_ones_and_the_routers():
    text = (Path(__file__).parents[2] / "docs" / "packs.md").read_text()
    (line,) = [
        line for line in text.splitlines() if line.strip().startswith("sites: [")
    ]
    found = build(yaml.safe_load(line), experts=EXPERTS).wanted
    routers = {Site(layer, "router.logits") for layer in range(LAYERS)}
    assert found == build({}, experts=EXPERTS).wanted | routers


def bits(rows, row):
    """The ids whose bits are set."""
    words = rows[row].tolist()
    return [i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1]


def test_token_sets_are_bits_of_rows():
    named = {"a/x": [0, 31, 69], "b/x": [32], "b/y": [5]}
    sets = TokenSets.resolve(named, 4, VOCABULARY, NO_TOKENIZER)
    rows = sets.rows()
    assert rows.dtype is torch.int32 and rows.shape == (4, 3)
    assert [bits(rows, row) for row in range(4)] == [[0, 31, 69], [32], [5], []]
    found = sets.named()
    assert [(name, found[name].row) for name in found] == [
        ("a/x", 0),
        ("b/x", 1),
        ("b/y", 2),
    ]
    assert len({entry.digest for entry in found.values()}) == 3


def test_token_sets_without_room_ids_or_tokenizer_are_refused():
    with pytest.raises(SpecError, match="raise token_sets"):
        TokenSets.resolve({"a/x": [1], "a/y": [1]}, 1, VOCABULARY, NO_TOKENIZER)
    with pytest.raises(SpecError, match=r"0\.\.69"):
        TokenSets.resolve({"a/x": [70]}, 1, VOCABULARY, NO_TOKENIZER)
    rule = {"a/x": {"decoded_endswith": "!"}}
    with pytest.raises(SpecError, match=r"a/x.*skip_tokenizer_init.*list token ids"):
        TokenSets.resolve(rule, 1, VOCABULARY, NO_TOKENIZER)
    broken = SimpleNamespace(
        skip_tokenizer_init=False,
        tokenizer="/no/such/folder",
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    with pytest.raises(SpecError, match=r"a/x.*no/such/folder"):
        TokenSets.resolve(rule, 1, VOCABULARY, broken)


def test_a_rule_is_applied_to_the_models_vocabulary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"yes": 0, "no": 1, "wow!": 2, "!": 3}
    model = tokenizers.models.WordLevel(words, unk_token="no")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    fast.save_pretrained(tmp_path)
    config = SimpleNamespace(
        skip_tokenizer_init=False,
        tokenizer=str(tmp_path),
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    rule = {"a/x": {"decoded_endswith": "!"}, "a/y": [1]}
    rows = TokenSets.resolve(rule, 2, VOCABULARY, config).rows()
    assert [bits(rows, 0), bits(rows, 1)] == [[2, 3], [1]]


def test_switches():
    switches = AppSwitches(["a", "b"], ["a"])
    assert switches.defaults == ("a",) and not switches.disabled
    before = switches.disabled
    switches.disable("a")
    switches.disable("a")
    assert switches.disabled == {"a"} and not before
    assert not switches.defaults
    switches.enable("a")
    assert switches.defaults == ("a",)
    for switch in (switches.enable, switches.disable):
        with pytest.raises(SpecError, match="a, b"):
            switch("c")


class _Slow(frozenset):
    """A set whose changes take as long as another thread needs to change it too."""

    def __or__(self, other):
        time.sleep(0.02)
        return _Slow(frozenset(self) | other)

    def __sub__(self, other):
        time.sleep(0.02)
        return _Slow(frozenset(self) - other)


def test_switches_turned_at_the_same_time_are_all_turned():
    names = [f"app{number}" for number in range(6)]
    switches = AppSwitches(names, [])
    switches.disabled = _Slow(names[:3])
    with ThreadPoolExecutor(6) as threads:
        threads.map(switches.enable, names[:3])
        threads.map(switches.disable, names[3:])
    assert switches.disabled == set(names[3:])


def test_names_of_apps_cannot_collide_with_vectors():
    registry = VectorRegistry(torch.float32, HIDDEN, 8)
    registry.add("steer/v", torch.ones(HIDDEN))
    with pytest.raises(SpecError, match="one vector of each name"):
        AppRegistry([steer()]).register(registry)
