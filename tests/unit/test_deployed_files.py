"""A process makes the tables of one deployment once, as long as its files are the same."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from eyesplice import App, SpecError, write
from eyesplice.integration import app_registry, deployed_files
from eyesplice.integration.config import parse_config
from eyesplice.integration.deployment import Deployment
from eyesplice.integration.frontend import FrontEnd
from tests.deployment_world import HIDDEN, steer, vllm_config


@pytest.fixture
def makes(monkeypatch):
    """The deployments that were made, in order."""
    made, make = [], Deployment._make.__func__

    def counted(cls, config, vllm):
        found = make(cls, config, vllm)
        made.append(found)
        return found

    monkeypatch.setattr(Deployment, "_make", classmethod(counted))
    return made


@pytest.fixture
def config(tmp_path):
    steer("a").save(tmp_path / "a")
    (tmp_path / "vectors").mkdir()
    save(tmp_path, 1.0)
    return {"apps": str(tmp_path / "a"), "vectors": str(tmp_path / "vectors")}


def save(folder, value):
    save_file({"v": torch.full((HIDDEN,), value)}, folder / "vectors/v.safetensors")


def build(config, **model):
    return Deployment.build(parse_config(config), vllm_config(**model))


def test_front_end_and_worker_of_one_process_share_one_making(makes, config):
    first = build(config)
    salted = {**config, "salt": "abc"}
    front = FrontEnd(vllm_config(additional_config={"eyesplice": salted}))
    worker = Deployment.of(vllm_config(additional_config={"eyesplice": salted}))
    assert len(makes) == 1
    # Each has its own configuration and tables, of equal content.
    assert (first.config.salt, worker.config.salt) == ("", "abc")
    assert torch.equal(front.deployment.registry.bank, worker.registry.bank)
    assert worker.needs == first.needs and worker.wanted == first.wanted


def test_what_one_holder_registers_no_other_has(makes, config):
    one = build(config)
    # What a registration does, whatever rules it has to obey.
    one.registry._frozen = False
    one.registry.add("late", torch.ones(HIDDEN))
    one.registry.mask_row((1,), (2,))
    one.registry.bank[1] = 7.0
    one.apps._apps["late"] = steer("late")
    one.token_sets._ids["late"] = (1,)
    two = build(config)
    assert len(makes) == 1
    assert two.registry.names() == ["a/v", "v"]
    assert two.registry._frozen and not two.registry._masks
    assert two.registry.tensor("v").tolist() == [1.0] * HIDDEN
    assert two.apps.names == ("a",)
    assert two.token_sets.named() == {}


def test_content_decides_and_times_do_not(makes, config, tmp_path):
    file = tmp_path / "vectors" / "v.safetensors"
    build(config)
    os.utime(file, (1, 1))
    assert build(config).registry.tensor("v")[0] == 1
    assert len(makes) == 1
    save(tmp_path, 2.0)
    os.utime(file, (1, 1))
    assert build(config).registry.tensor("v")[0] == 2
    assert len(makes) == 2
    shutil.copy(file, file.with_name("w.safetensors"))
    assert build(config).registry.names() == ["a/v", "v", "w"]
    steer("a", seed=5).save(tmp_path / "a")
    wanted = steer("a", seed=5).tensors["v"]
    assert torch.equal(build(config).registry.tensor("a/v"), wanted)
    assert len(makes) == 4


@pytest.mark.parametrize(
    ("more", "model"),
    [({"max_entries": 3}, {}), ({}, {"dtype": torch.bfloat16}), ({}, {"experts": 4})],
)
def test_other_settings_and_models_are_others(makes, config, more, model):
    build(config)
    build({**config, **more}, **model)
    assert len(makes) == 2


class Tokenizer:
    def __init__(self):
        self.decoded = 0

    def decode(self, ids, skip_special_tokens):
        self.decoded += 1
        return f"token {ids[0]}"

    def convert_ids_to_tokens(self, ids):
        return [f"token {ids[0]}"]


def test_a_vocabulary_is_decoded_once(makes, tmp_path, monkeypatch):
    tokenizer = Tokenizer()
    monkeypatch.setattr(app_registry, "_tokenizer", lambda name, model: tokenizer)
    function = write("steering_vector", vector=torch.ones(HIDDEN)).layers(1)
    App("a", [function.cond("token_in(s)")], {}, {"s": {"decoded_endswith": "9"}}).save(
        tmp_path / "a"
    )
    config = {"apps": str(tmp_path / "a")}
    rows = [build(config, skip_tokenizer_init=False).token_set_rows() for _ in "123"]
    assert tokenizer.decoded == 70 and len(makes) == 1
    assert all(torch.equal(rows[0], row) for row in rows)
    (tmp_path / "vocabulary").mkdir()
    local = {"skip_tokenizer_init": False, "tokenizer": str(tmp_path / "vocabulary")}
    build(config, **local)
    (tmp_path / "vocabulary" / "tokenizer.json").write_text("{}")
    build(config, **local)
    assert len(makes) == 3


def test_refusals_are_not_kept(makes, config, tmp_path):
    file = tmp_path / "vectors" / "v.safetensors"
    file.write_bytes(b"nothing")
    for _ in range(2):
        with pytest.raises(SpecError, match=r"v\.safetensors"):
            build(config)
    save(tmp_path, 3.0)
    assert build(config).registry.tensor("v")[0] == 3


def test_too_many_files_are_read_each_time(makes, config, tmp_path, monkeypatch):
    monkeypatch.setattr(deployed_files, "_MAX_FILES", 4)
    for number in range(5):
        (tmp_path / "a" / f"{number}.txt").touch()
    build(config), build(config)
    assert len(makes) == 2
    monkeypatch.setattr(deployed_files, "_MAX_FILES", 10)
    build(config), build(config)
    assert len(makes) == 3
    monkeypatch.setattr(deployed_files, "_MAX_BYTES", 10)
    build(config), build(config)
    assert len(makes) == 5


def test_a_link_that_leads_elsewhere_is_another_content(makes, tmp_path):
    """Two versions of the tensors side by side, and a link to the one that counts."""
    app = steer("a")
    app.save(tmp_path / "a" / "one")
    steer("a", seed=5).save(tmp_path / "a" / "two")
    link, file = tmp_path / "a" / "current", tmp_path / "a" / "app.yaml"
    text = (tmp_path / "a" / "one" / "app.yaml").read_text()
    file.write_text(text.replace("tensors.safetensors", "current/tensors.safetensors"))
    link.symlink_to("one", target_is_directory=True)
    config = {"apps": str(tmp_path / "a")}
    assert torch.equal(build(config).registry.tensor("a/v"), app.tensors["v"])
    link.unlink()
    link.symlink_to("two", target_is_directory=True)
    wanted = steer("a", seed=5).tensors["v"]
    assert torch.equal(build(config).registry.tensor("a/v"), wanted)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("qwen.tiktoken", True),
        ("tokenization_own.py", True),
        ("source.spm", True),
        ("tokenizer.model", True),
        ("model-00001-of-00002.safetensors", False),
        ("pytorch_model.bin", False),
    ],
)
def test_all_that_a_tokenizer_can_be_made_of_counts_and_weights_do_not(
    makes, config, tmp_path, name, counts
):
    folder = tmp_path / "model"
    folder.mkdir()
    for text in ("one", "two"):
        (folder / name).write_text(text)
        build(config, tokenizer=str(folder))
    assert len(makes) == 1 + counts
