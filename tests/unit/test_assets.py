"""The shipped sentiment direction agrees with its passport."""

import hashlib
import json
from importlib.resources import files
from typing import Any

import pytest
from safetensors.torch import load
from torch import Tensor, float32

from eyesplice.fx_passes.sites import parse_layers, parse_submodule
from eyesplice.integration.model_fetch import GGUF_SHA256, MODEL_NAME

ASSETS = files("eyesplice.integration.assets")


@pytest.fixture(scope="module")
def sentiment() -> Tensor:
    tensors = load((ASSETS / "sentiment.safetensors").read_bytes())
    assert list(tensors) == ["sentiment"]
    return tensors["sentiment"]


@pytest.fixture(scope="module")
def passport() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ASSETS / "sentiment.json").read_text("utf-8"))
    return read


def test_tensor_is_one_finite_row(sentiment: Tensor) -> None:
    assert sentiment.shape == (576,)
    assert sentiment.dtype == float32
    assert sentiment.isfinite().all()
    assert sentiment.norm() > 0


def test_passport_describes_the_tensor(
    sentiment: Tensor, passport: dict[str, Any]
) -> None:
    digest = hashlib.sha256(sentiment.numpy().tobytes()).hexdigest()
    assert passport["tensor_sha256"] == digest
    assert passport["shape"] == list(sentiment.shape)
    assert passport["norm"] == pytest.approx(float(sentiment.norm()), abs=1e-3)


def test_passport_names_the_model_the_site_and_the_recipe(
    passport: dict[str, Any],
) -> None:
    assert passport["model"] == MODEL_NAME
    assert passport["weights_sha256"] == GGUF_SHA256
    assert parse_layers(passport["layer"], 30) == (passport["layer"],)
    submodule = (passport["submodule"], None)
    assert parse_submodule(passport["submodule"]) == submodule
    assert parse_submodule(passport["alias"]) == (submodule[0], passport["layer"])
    assert {"recipe", "h_norms", "license", "script"} <= passport.keys()


def test_metadata_repeats_the_passport(passport: dict[str, Any]) -> None:
    data = (ASSETS / "sentiment.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    keys = ("model", "layer", "submodule", "recipe", "norm")
    assert metadata == {key: str(passport[key]) for key in keys}


def test_measured_effect_is_clear(passport: dict[str, Any]) -> None:
    means = passport["vader_means"]
    assert means["+1"] - means["plain"] > 0.3
    assert means["plain"] - means["-1"] > 0.2
    assert abs(means["ablated"] - means["plain"]) < 0.2


def test_demo_is_complete(passport: dict[str, Any]) -> None:
    demo = passport["demo"]
    assert demo["prompt"]
    assert demo["scales"] == [1.0, -1.0]
    assert demo["layer"] == passport["layer"]
    assert demo["submodule"] == passport["submodule"]
    texts = demo["texts_fp32"]
    assert set(texts) == {"plain", "+1", "-1", "ablated"}
    assert len(set(texts.values())) == len(texts)
