"""On a GPU, in bf16: routers hidden in the experts' op, and models without a graph.

The model is a small random Qwen3-MoE made here, whose router vLLM runs inside its op.
Rows of 2048 elements are summed in one order by the kernel and by Inductor. Every kind of
engine answers the same questions:

    vanilla, again         compiled vLLM, twice: how far it agrees with itself
    cold, warm             compiled, with CUDA graphs: the router by a hook
    eager-vanilla, eager   `enforce_eager`: every site by a hook
    captured               no graph of Inductor's, but CUDA graphs of the hooked modules

The write activates as many experts as a token goes to, so that no near tie of two
experts decides: their weights are equal then.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from eyesplice.benchmarks.engines import EngineProcess
from eyesplice.integration.apps import steermoe
from tests.experts import routed, steered
from tests.gpu.conftest import RUNNERS
from tests.oracle import Oracle

LAYERS, HIDDEN, EXPERTS, TOP_K, VOCAB = 4, 2048, 8, 2, 4096
ACTIVATE: dict[int, list[int]] = {0: [1, 6], 1: [0, 3], 2: [2, 7], 3: [4, 5]}
STEER = {"eyesplice": "steermoe"}
TOKENS = 24

CAPTURED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "again": {},
    "cold": {},
    "warm": {},
    "eager-vanilla": {"enforce_eager": True},
    "eager": {"enforce_eager": True},
    "captured": {"compilation_config": CAPTURED},
}
SPLICED = ("cold", "warm", "eager", "captured")

Answer = dict[str, Any]

_TRIES = 6


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, weights as they are after rounding to bf16."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.1 * noise)
            else:
                wide = any(part in name for part in ("embed", "down_proj", "o_proj"))
                parameter.copy_(noise * (0.1 if wide else HIDDEN**-0.5))
    folder = tmp_path_factory.mktemp("qwen3-moe")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class Family:
    """The engines of one runner, started at once; the warm one after the cold one."""

    def __init__(self, runner: str, model: Path, extras: Path, out: Path) -> None:
        self.runner = runner
        self._model, self._extras, self._out = model, extras, out
        at_once = (kind for kind in KINDS if kind != "warm")
        self._engines = {kind: self._start(kind) for kind in at_once}

    def get(self, kind: str) -> EngineProcess:
        """The engine of a kind."""
        if kind == "warm":
            self.get("cold")
        if kind not in self._engines:
            self._engines[kind] = self._start(kind)
        engine = self._engines[kind]
        return engine if engine.ready else engine.wait()

    def close(self) -> None:
        """Stop them all."""
        for engine in self._engines.values():
            engine.close()

    def _start(self, kind: str) -> EngineProcess:
        spliced = kind in SPLICED
        config = {
            "apps": str(self._extras / "steermoe"),
            "vectors": str(self._extras / "vectors"),
            "sites": "all",
        }
        cache = "cold" if kind == "warm" else kind
        return EngineProcess(
            f"router-{self.runner}-{kind}",
            self._out / f"router-{self.runner}-{kind}.log",
            plugin=spliced,
            env={
                "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[self.runner],
                "VLLM_CACHE_ROOT": str(self._extras / f"{self.runner}-{cache}"),
            },
            model=str(self._model),
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.1,
            enable_prefix_caching=False,
            additional_config={"eyesplice": config} if spliced else {},
            seed=0,
            **KINDS[kind],
        )


@pytest.fixture(scope="module", params=list(RUNNERS))
def family(
    request: pytest.FixtureRequest,
    moe: Path,
    out: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Family]:
    """The engines of one runner."""
    extras = tmp_path_factory.mktemp("extras")
    steermoe.app(ACTIVATE, {}).save(extras / "steermoe")
    (extras / "vectors").mkdir()
    generator = torch.Generator().manual_seed(5)
    for name, width in (("experts", EXPERTS), ("v", HIDDEN)):
        vector = torch.randn(width, generator=generator)
        save_file({"vector": vector}, extras / "vectors" / f"{name}.safetensors")
    made = Family(request.param, moe, extras, out)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle(moe: Path) -> Oracle:
    return Oracle(moe)


def prompts(count: int, seed: int, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    made: list[list[int]] = torch.randint(
        0, VOCAB, (count, length), generator=generator
    ).tolist()
    return made


def ask(
    engine: EngineProcess,
    batch: list[list[int]],
    programs: list[dict[str, Any] | None],
) -> list[Answer]:
    """Tokens, logprobs and the eyesplice object of each request."""
    found = engine.generate(batch, TOKENS, programs, logprobs=1)
    keys = ("tokens", "logprobs", "eyesplice")
    rows = zip(*(found[key] for key in keys), strict=True)
    return [dict(zip(keys, row, strict=True)) for row in rows]


def judged(oracle: Oracle, prompt: list[int], answer: Answer) -> float:
    """The median difference of the chosen tokens' logprobs from the oracle's."""
    ids = [*prompt, *answer["tokens"]]
    expected = oracle.logprobs(ids[:-1], len(prompt))[len(prompt) - 1 :]
    chosen = expected.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
    return float((chosen - torch.tensor(answer["logprobs"])).abs().median())


@pytest.mark.parametrize("kind", SPLICED)
def test_the_table(family: Family, kind: str) -> None:
    ready = family.get(kind).ready
    v2 = ready["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert v2 == (family.runner == "v2")
    assert ready["missing_sites"] == 0
    if kind in ("cold", "warm"):
        assert ready["cudagraph_mode"].endswith("FULL_AND_PIECEWISE")
        assert ready["hooks"] == LAYERS
        assert ready["boundary_ops"] == 2 * LAYERS + 1
        assert ready["pass_ran"] == (kind == "cold")
    else:
        graphs = ready["cudagraph_mode"].endswith("FULL_DECODE_ONLY")
        assert graphs == (kind == "captured")
        assert ready["hooks"] == 2 * LAYERS + 1 + 2 * LAYERS
        assert ready["boundary_ops"] == ready["inline_ops"] == 0


@pytest.mark.parametrize(
    ("kind", "against"),
    [
        ("cold", "vanilla"),
        ("warm", "vanilla"),
        ("eager", "eager-vanilla"),
        ("captured", "eager-vanilla"),
    ],
)
def test_idle_is_vanilla(
    family: Family, kind: str, against: str, record: dict[str, Any]
) -> None:
    batch, idle = prompts(32, 1), [None] * 32
    theirs = ask(family.get(against), batch, idle)
    mine = ask(family.get(kind), batch, idle)
    found = record.setdefault(f"router-{family.runner}", {})
    noted = found[f"idle_{kind}"] = {
        "tokens_equal_of_32": sum(_equal("tokens", mine, theirs)),
        "logprobs_equal_of_32": sum(_equal("logprobs", mine, theirs)),
    }
    if kind == "captured":
        # vLLM may choose other attention kernels when it captures.
        assert noted["tokens_equal_of_32"] >= 24
        return
    if against == "vanilla":
        # Which requests share a step depends on when they arrive, and so do the bits of
        # vLLM's kernels for experts, in a compiled engine with CUDA graphs: an engine may
        # answer otherwise when it is asked again, vanilla too.
        itself = [theirs]
        while not all(_equal("tokens", mine, theirs)) and len(itself) < _TRIES:
            theirs = ask(family.get("again"), batch, idle)
            mine = ask(family.get(kind), batch, idle)
            itself.append(theirs)
        noted["asked"] = len(itself)
        least = min(sum(_equal("tokens", other, itself[0])) for other in itself)
        found["vanilla_equal_to_itself_of_32"] = least
        if least < len(batch):
            assert sum(_equal("tokens", mine, theirs)) >= 24
            return
    assert all(_equal("tokens", mine, theirs))
    if kind == "eager":
        assert all(_equal("logprobs", mine, theirs))


def _equal(what: str, mine: list[Answer], theirs: list[Answer]) -> list[bool]:
    return [a[what] == b[what] for a, b in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize("kind", SPLICED)
def test_steermoe(
    family: Family, kind: str, oracle: Oracle, record: dict[str, Any]
) -> None:
    batch = prompts(4, 2)
    answers = ask(family.get(kind), batch, [STEER] * 4)
    edits = {layer: steered(experts, []) for layer, experts in ACTIVATE.items()}
    with routed(oracle.layers, edits):
        own = [judged(oracle, p, a) for p, a in zip(batch, answers, strict=True)]
    plain = [judged(oracle, p, a) for p, a in zip(batch, answers, strict=True)]
    record.setdefault(f"router-{family.runner}", {})[f"steermoe_{kind}"] = {
        "median_from_same_routing": own,
        "median_from_plain_routing": plain,
    }
    for steered_, unsteered in zip(own, plain, strict=True):
        assert steered_ <= 0.05
        assert unsteered >= 4 * steered_
    assert all(
        a["eyesplice"]["writes"][0]["tokens"] == 40 + TOKENS - 1 for a in answers
    )


READS: dict[str, Any] = {
    "eyesplice": {
        "reads": [
            {"read": "router", "name": "chosen", "layers": "all"},
            {"read": "capture", "layers": "all", "submodule": "router.logits"},
            {
                "read": "dot",
                "name": "p",
                "weight": "experts",
                "layers": [2],
                "submodule": "router.logits",
            },
        ],
        "writes": [],
    }
}


def logits(answer: Answer, layer: int) -> Tensor:
    """The captured logits of a layer, fp32 `[tokens, experts]`."""
    capture = answer["eyesplice"]["captures"][f"router.logits[{layer}]"]
    data = bytearray(base64.b64decode(capture["data"]))
    assert capture["positions"] == list(range(len(capture["positions"])))
    rows = torch.frombuffer(data, dtype=torch.bfloat16).view(capture["shape"])
    return rows.float()


@pytest.mark.parametrize("kind", SPLICED)
def test_reads_of_the_router(
    family: Family, kind: str, oracle: Oracle, record: dict[str, Any]
) -> None:
    batch = prompts(2, 3)
    answers = ask(family.get(kind), batch, [READS] * 2)
    errors = []
    for prompt, answer in zip(batch, answers, strict=True):
        ids = [*prompt, *answer["tokens"]][:-1]
        with routed(oracle.layers, dict.fromkeys(range(LAYERS), _same)) as seen:
            oracle.logprobs(ids, len(prompt))
        for part in answer["eyesplice"]["experts"]["chosen"]:
            layer, found = part["layer"], logits(answer, part["layer"])
            assert found.shape == (len(ids), EXPERTS)
            wrong = (found - seen[layer]).norm(dim=-1) / seen[layer].norm(dim=-1)
            errors.append(float(wrong.median()))
            # The k-th largest logit is at most a chosen expert's: ties may go either way.
            least = found.topk(TOP_K, dim=-1).values[:, -1:]
            chosen = found.gather(1, torch.tensor(part["experts"]))
            assert (chosen >= least).all()
    record.setdefault(f"router-{family.runner}", {})[f"logits_{kind}"] = errors
    assert max(errors) <= 0.05


def _same(z: Tensor) -> Tensor:
    return z


@pytest.mark.parametrize("kind", SPLICED)
def test_a_gate_on_the_router_opens_where_its_score_says(
    family: Family, kind: str
) -> None:
    place, dot = {"submodule": "router.logits"}, READS["eyesplice"]["reads"][2]
    plain: list[dict[str, Any] | None] = [{"eyesplice": {"reads": [dot]}}] * 4
    # Each prompt has a level of its own: their scores hardly overlap.
    levels = [
        float(torch.tensor(answer["eyesplice"]["scores"]["p"]["values"]).median())
        for answer in ask(family.get(kind), prompts(4, 4), plain)
    ]
    write = {"name": "w", "vector": "v", "layers": [3], "submodule": "mlp.post"}
    programs: list[dict[str, Any] | None] = []
    for level in levels:
        gate = f"p >= {level!r}"
        opened = {"read": "norm", "name": "open", "layers": [3], "gate": gate, **place}
        spec = {"reads": [dot, opened], "writes": [{**write, "gate": gate}]}
        programs.append({"eyesplice": spec})
    answers = ask(family.get(kind), prompts(4, 4), programs)
    for level, answer in zip(levels, answers, strict=True):
        found = answer["eyesplice"]
        values = torch.tensor(found["scores"]["p"]["values"])
        expected = (values >= level).nonzero()[:, 0].tolist()
        assert 0 < len(expected) < len(values) == 40 + TOKENS - 1
        assert found["scores"]["open"]["positions"] == expected
        assert found["writes"][0]["tokens"] == len(expected)


@pytest.mark.parametrize(
    ("kind", "against"), [("cold", "vanilla"), ("eager", "eager-vanilla")]
)
def test_a_mixed_batch_leaves_its_neighbours_alone(
    family: Family, kind: str, against: str
) -> None:
    batch = prompts(16, 6)
    programs: list[dict[str, Any] | None] = [STEER, None, READS, None] * 4
    against_idle = ask(family.get(kind), batch, [None] * 16)
    theirs = ask(family.get(against), batch, [None] * 16)
    mixed = ask(family.get(kind), batch, programs)
    moved = parted = 0
    for program, mine, idle, plain in zip(
        programs, mixed, against_idle, theirs, strict=True
    ):
        if program is STEER:
            moved += mine["tokens"] != plain["tokens"]
        elif kind == "eager":
            assert mine["tokens"] == plain["tokens"]
            assert mine["logprobs"] == plain["logprobs"]
        else:
            parted += mine["tokens"] != idle["tokens"]
    # Which expert kernel runs, and in what order it sums, follows from the batch.
    assert parted <= 2
    assert moved == 4
    (alone,) = ask(family.get(kind), batch[:1], [STEER])
    assert mixed[0]["eyesplice"]["writes"] == alone["eyesplice"]["writes"]
