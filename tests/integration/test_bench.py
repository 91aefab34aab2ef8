"""Every case of `eyesplice bench` on tiny models: checks run, records hold what they say.

Times are not judged here. One pair of engines serves the cases that need one.
"""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyesplice.benchmarks import (
    capture,
    configs,
    decode,
    host,
    layers,
    memory,
    peers,
    prompts,
    serve,
    startup,
    trace,
)
from eyesplice.benchmarks.bench import Bench, Pair
from eyesplice.benchmarks.records import Refused
from tests.integration.conftest import Models
from tests.integration.test_server import _save_tokenizer
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS

pytestmark = pytest.mark.engine

QUICK = {"mode": 2, "backend": "eager"}
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "compilation_config": QUICK,
}
STEPS = 14


class OneStart(Bench):
    """A bench whose cases all get the same pair, fit for each of them."""

    def pair(self, name: str = "pair", **kwargs: Any) -> Pair:
        """The pair: hooks timed, and a ring for every token's rows."""
        return super().pair("every", clock=True, capture_rows=1024)


@pytest.fixture(scope="module")
def bench(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = OneStart(
        out=tmp_path_factory.mktemp("bench"),
        console=Console(file=StringIO(), width=140),
        model=models["llama"],
        load_format="auto",
        rounds=2,
        engine=ENGINE,
    )
    yield made
    made.close()


def printed(bench: Bench) -> str:
    """What was printed since the last call."""
    text = bench.console.file.getvalue()
    bench.console.file.seek(0)
    bench.console.file.truncate()
    return text


def record(bench: Bench, case: str) -> Any:
    return json.loads((bench.out / f"{case}-llama.json").read_text())


def test_decode(bench: Bench) -> None:
    decode.run(bench, [2, 3], STEPS)
    found = record(bench, "decode")
    assert found["check"]["equal"] == found["check"]["prompts"] == 64
    assert found["check"]["steered"] == found["check"]["distinct"] == 8
    assert found["machine"]["eyesplice"] and found["engines"]["vanilla"]["vllm"]
    assert set(found["results"]) == {"2", "3"}
    for cases in found["results"].values():
        assert list(cases) == [
            "vanilla",
            "idle",
            "one layer, 1 vector",
            "all boundaries, 1 vector",
            "all boundaries, 4 vectors",
        ]
        for case in cases.values():
            assert len(case["wall"]["all_ms"]) == 2 and case["wall"]["ms"] > 0
            assert case["device"] is None
    assert "all boundaries, 4 vectors" in printed(bench)


def test_prompts(bench: Bench) -> None:
    prompts.run(bench, [40], 3, 4)
    found = record(bench, "prompts")
    assert found["batch"] == 3 and set(found["results"]) == {"40"}
    cases = found["results"]["40"]
    assert list(cases)[:2] == ["vanilla", "idle"] and len(cases) == 5
    for case in cases.values():
        # The step with the prompt is one of the cycle's.
        assert 0 < case["host"]["ms"] < case["wall"]["ms"]
        assert len(case["wall"]["all_ms"]) == 2
    assert "prompt of 40" in printed(bench)


def test_configs(bench: Bench) -> None:
    configs.run(bench, 6, STEPS, [1, 3, 64])
    cases = record(bench, "configs")["results"]["6"]
    assert {"vanilla", "0 programs", "3 programs, all layers"} <= set(cases)
    assert not any("64" in name for name in cases)


def test_layers(bench: Bench) -> None:
    layers.run(bench, [2], STEPS)
    assert set(record(bench, "layers")["results"]["2"]) == {
        "vanilla",
        "idle",
        "1 layer",
        "4 layers",
    }


def test_a_trace_without_a_graph_of_a_step_is_refused(bench: Bench) -> None:
    with pytest.raises(Refused, match="no kernels: this engine replays no graph"):
        trace.run(bench, [2])
    assert not (bench.out / "trace-llama.json").exists()


def test_memory(bench: Bench) -> None:
    memory.run(bench)
    found = record(bench, "memory")
    # 32-bit words a token and boundary, and fp32 rows; no GPU measures them here.
    assert found["tables"]["token_map"] == 4 * 512 * (2 * NUM_LAYERS + 1)
    assert found["tables"]["bank"] == 4 * 1024 * HIDDEN_SIZE
    assert found["user_tensors"] == (256 + 1) * 4 * HIDDEN_SIZE
    assert found["sum"] == sum(found["tables"].values())
    assert found["measured"] is None
    assert "sum without user tensors" in printed(bench)


def test_host(bench: Bench) -> None:
    host.run(bench, [1, 3], 6)
    cases = record(bench, "host")["results"]["3"]
    idle, active = (cases[name]["microseconds"] for name in ("idle", "a program each"))
    assert 0 < idle["median"] < active["median"]
    assert "update_from_output" in active["hooks"]
    assert cases["idle"]["more_calls"] is None


def test_capture(bench: Bench) -> None:
    capture.run(bench, 3, 10, 2)
    found = record(bench, "capture")["results"]
    assert found["last token"]["last token"]["rows"] == 3 * NUM_LAYERS
    # 10 tokens of the prompt, and 3 of the 4 generated ones.
    assert found["every token"]["every token"]["rows"] == 2 * 13 * NUM_LAYERS
    assert found["every token"]["idle"]["rows"] == 0


def test_lost_rows_are_refused(bench: Bench) -> None:
    with pytest.raises(Refused, match="rows were captured"):
        # A ring of 1024 rows has no room for a step of 512 tokens at 4 layers.
        capture.run(bench, 1, 10, 60)


def test_peers(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "hotwire_vllm-9.9-py3-none-any.whl").write_text("no wheel")
    found = peers.run(bench, tmp_path, 2, 24)
    assert {"vanilla", "enforce_eager", "eyesplice idle", "eyesplice steered"} == set(
        found["results"]
    )
    assert "does not install" in found["failed"]["hotwire"]
    assert "no wheel vllm_lens-*.whl" in found["failed"]["vllm-lens"]
    assert "does not install" in printed(bench)


def test_startup(bench: Bench) -> None:
    startup.run(bench, 1)
    found = record(bench, "startup")
    assert found["check"]["equal"] == 16
    assert found["warm_loaded"] is True
    for kind in ("cold", "warm"):
        assert found["results"][kind]["seconds"]["against"]["ratio"] > 0


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of short runs: a cut off dataset and a borrowed tokenizer."""
    folder = tmp_path_factory.mktemp("serve")
    turns = [{"value": " ".join(f"w{i}" for i in range(20))}, {"value": "w1 w2"}]
    records = [{"conversations": turns} for _ in range(20)]
    (folder / "sharegpt.json").write_text(json.dumps(records, indent=2)[:-20])
    (folder / "tokenizer").mkdir()
    _save_tokenizer(folder / "tokenizer")
    return {
        "model": models["llama"],
        "dataset": folder / "sharegpt.json",
        "tokenizer": folder / "tokenizer",
        "prompts": 3,
        "output_tokens": 6,
        "rate": 50.0,
        "runs": 2,
        "load_format": "auto",
        "cache_bytes": 64 << 20,
        "server_options": (
            *("--dtype", "float32", "--compilation-config", json.dumps(QUICK)),
        ),
    }


def test_serve(
    served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    output = StringIO()
    console = Console(file=output, width=140)
    settings = serve.Settings(**served, rows=("idle", "cast", "all"))
    found = serve.run(settings, tmp_path, console)
    written = (tmp_path / "serve-llama.json").read_text()
    assert json.loads(json.dumps(found)) == json.loads(written)
    (sitting,) = found["sittings"]
    assert sitting["check"]["equal"] == 6
    assert sitting["check"]["acted"]["cast"]["greedy"]["tokens"]["cast"] > 0
    assert len(sitting["check"]["acted"]["all"]["greedy"]["tokens"]) == 6
    assert set(found["rows"]) == {"idle", "cast", "all"}
    for row in found["rows"].values():
        for metric in row["metrics"].values():
            assert len(metric["row"]["values"]) == len(metric["vanilla"]["values"]) == 2
            assert metric["ratio"] > 0
    serve.print_record(found, console)
    assert "mean ITL, ms" in output.getvalue()


def test_serve_refuses_rows_that_a_model_has_not(
    served: dict[str, Any], tmp_path: Path
) -> None:
    settings = serve.Settings(**served, rows=("steermoe",))
    with pytest.raises(Refused, match=r"no such rows: steermoe; .* idle, arditi"):
        serve.run(settings, tmp_path, Console(file=StringIO()))
