"""The ways to switch eyesplice on, and the deployments that are refused at start-up."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyesplice import SpecError
from eyesplice.integration.deployment import Deployment
from eyesplice.integration.plugin import register
from tests import oracle as judge
from tests.engine import (
    QUICK,
    Ask,
    asking,
    assert_judged,
    distance,
    engine,
    prompt,
    write,
)
from tests.tiny_models import HIDDEN_SIZE

pytestmark = pytest.mark.engine

FLAG = {
    **QUICK,
    "inductor_passes": {"post_grad_custom_post_pass": "eyesplice.splice_pass"},
}
STEERED = Ask(prompt(7), asking(write("v0", [1], scale=2.0)))


def _config(model: Path, eyesplice: object = None, **options: Any) -> Any:
    """What vLLM makes of the arguments, without an engine."""
    register()
    from vllm import EngineArgs

    if eyesplice is not None:
        options["additional_config"] = {"eyesplice": eyesplice}
    options = {"skip_tokenizer_init": True, "compilation_config": QUICK} | options
    return EngineArgs(model=str(model), **options).create_engine_config()


def _is_on(config: Any) -> bool:
    return bool(config.additional_config.get("eyesplice", {}).get("salt"))


def _assert_steers(running: Any, vectors: Any, oracle: judge.Oracle) -> None:
    steered, plain = running.ask(STEERED, Ask(STEERED.prompt))
    edit = judge.add(vectors["v0"], 2.0)
    assert_judged(oracle, steered, judge.Intervention("residual.post", 1, edit))
    assert_judged(oracle, plain)
    assert distance(steered, plain) > 1e-2


def test_it_is_off_unless_asked_for(models):
    config = _config(models["llama"])
    assert "eyesplice" not in config.additional_config
    assert Deployment.of(config) is None


def test_additional_config_switches_it_on(models):
    assert _is_on(_config(models["llama"], {}))


def test_a_file_named_by_the_environment_switches_it_on(
    models, vectors, llama_oracle, tmp_path, monkeypatch
):
    file = tmp_path / "eyesplice.yaml"
    file.write_text(f"vectors: {vectors.folder}\nmax_entries: 2\n")
    monkeypatch.setenv("EYESPLICE_CONFIG", str(file))
    with engine(models["llama"]) as running:
        _assert_steers(running, vectors, llama_oracle)
        with pytest.raises(SpecError, match="at most 2"):
            running.ask(Ask(prompt(4), asking(*[write("v0", [1])] * 3)))


def test_additional_config_overrides_the_file(models, tmp_path, monkeypatch):
    file = tmp_path / "eyesplice.yaml"
    file.write_text("bank_rows: 50\nmax_entries: 2\n")
    monkeypatch.setenv("EYESPLICE_CONFIG", str(file))
    deployment = Deployment.of(_config(models["llama"], {"max_entries": 3}))
    assert deployment is not None
    config = deployment.config
    assert (config.bank_rows, config.max_entries) == (50, 3)


def test_the_pass_flag_switches_it_on(models, vectors, llama_oracle):
    with engine(models["llama"], compilation_config=FLAG) as running:
        assert not running.report.missing and len(running.report.rows) == 28
        with pytest.raises(SpecError, match="none yet"):
            running.ask(STEERED)
        assert_judged(llama_oracle, running.ask(Ask(STEERED.prompt))[0])


def test_the_pass_flag_goes_with_a_configuration(models, vectors, llama_oracle):
    config = {"vectors": str(vectors.folder), "sites": ["residual.post"]}
    with engine(models["llama"], config, compilation_config=FLAG) as running:
        _assert_steers(running, vectors, llama_oracle)
        assert {row.site.submodule for row in running.report.rows} == {
            "residual.post",
            "residual.pre",
        }


def test_salts_tell_deployments_apart_but_not_vectors(models, vectors):
    def salt(config: dict[str, object]) -> str:
        made = _config(models["llama"], config)
        return made.additional_config["eyesplice"]["salt"]

    salts = [
        salt({}),
        salt({"sites": ["residual.post"]}),
        salt({"max_entries": 4}),
        salt({"bank_rows": 64}),
    ]
    assert len(set(salts)) == len(salts)
    assert salt({"vectors": str(vectors.folder)}) == salts[0]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"compilation_config": {"mode": 1}}, "STOCK_TORCH_COMPILE"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config 'ngram'",
        ),
        ({"eyesplice": {"vektors": "x"}}, "vektors"),
        ({"eyesplice": {"max_entries": "8"}}, "max_entries"),
        ({"eyesplice": {"sites": ["residual.last"]}}, "residual.last"),
        ({"eyesplice": {"sites": [{"submodule": "mlp.pre", "layers": [9]}]}}, "0..3"),
        ({"eyesplice": ["residual.post"]}, "eyesplice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_served_is_refused_with_the_configuration(
    options: dict[str, Any], word: str, models
):
    with pytest.raises(SpecError) as caught:
        _config(models["llama"], **{"eyesplice": {}, **options})
    assert word in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "sites: [unclosed", "nonsense: 1\n"])
def test_a_bad_file_is_refused(text: str, models, tmp_path, monkeypatch):
    file = tmp_path / "eyesplice.yaml"
    file.write_text(text)
    monkeypatch.setenv("EYESPLICE_CONFIG", str(file))
    with pytest.raises(SpecError):
        _config(models["llama"])


def test_a_file_that_is_not_there_is_refused(models, monkeypatch):
    monkeypatch.setenv("EYESPLICE_CONFIG", "/no/such/file.yaml")
    with pytest.raises(SpecError, match=r"/no/such/file\.yaml"):
        _config(models["llama"])


def test_a_named_site_that_the_model_lacks_stops_the_start(models):
    with (
        pytest.raises(SpecError, match=r"router\.logits\[0\].*has no experts"),
        engine(models["llama"], {"sites": ["residual.post", "router.logits"]}),
    ):
        raise AssertionError("it started")


class _RunsCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def _pickled_code(folder: Path) -> None:
    (folder / "bad.pt").write_bytes(pickle.dumps(_RunsCode(folder / "ran")))


def _saved_code(folder: Path) -> None:
    torch.save({"vector": _RunsCode(folder / "ran")}, folder / "bad.pt")


def _tensor(tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file({"v": tensor}, folder / "bad.safetensors")


BAD_FILES: dict[str, Callable[[Path], None]] = {
    "too wide": _tensor(torch.ones(2 * HIDDEN_SIZE)),
    "four dimensions": _tensor(torch.ones(2, 2, 1, HIDDEN_SIZE)),
    "empty": _tensor(torch.ones(0, HIDDEN_SIZE)),
    "integers": _tensor(torch.ones(HIDDEN_SIZE, dtype=torch.int64)),
    "NaN": _tensor(torch.full((HIDDEN_SIZE,), torch.nan)),
    "infinite": _tensor(torch.full((HIDDEN_SIZE,), torch.inf)),
    "not safetensors": lambda f: (f / "bad.safetensors").write_bytes(b"nonsense" * 9),
    "not a .pt": lambda f: (f / "bad.pt").write_bytes(b"nonsense" * 9),
    "no tensor": lambda f: torch.save({"a": 1}, f / "bad.pt"),
    "pickled code": _pickled_code,
    "code in a torch file": _saved_code,
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_vector_file_that_cannot_be_used_is_refused_by_name(
    kind: str, models, tmp_path
):
    BAD_FILES[kind](tmp_path)
    with pytest.raises(SpecError, match=r"\bbad\b"):
        _config(models["llama"], {"vectors": str(tmp_path)})
    assert not (tmp_path / "ran").exists(), "code in a vector file has run"


def test_a_bank_too_small_for_the_vectors_is_refused(models, vectors):
    with pytest.raises(SpecError, match="raise bank_rows"):
        _config(models["llama"], {"vectors": str(vectors.folder), "bank_rows": 4})


def test_a_bad_vector_stops_the_start(models, tmp_path):
    _tensor(torch.full((HIDDEN_SIZE,), torch.nan))(tmp_path)
    with (
        pytest.raises(SpecError, match="vector bad"),
        engine(models["llama"], {"vectors": str(tmp_path)}),
    ):
        raise AssertionError("it started")
