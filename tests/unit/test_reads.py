"""Reads: what their entries say, and what the reference ops make of them."""

import pytest
import torch

from eyesplice import SpecError
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import CaptureInfo, ScoreInfo, pack_reads
from eyesplice.fx_passes.request import Read, parse_canonical, parse_request
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.ops.families import FAMILIES
from eyesplice.ops.layout import Family, Opcode, Reduce, Scope, Score
from tests import request_world
from tests.program_runner import run
from tests.request_world import HIDDEN, NUM_EXPERTS, RANK

TOKENS = 6
VECTORS = request_world.vectors()
CONTEXT = request_world.context(max_entries=32, table=VECTORS)
CAPTURE = {"read": "capture", "layers": [0, 2]}


def parse(*reads, context=CONTEXT):
    request = parse_request({"eyesplice": {"reads": list(reads)}}, context)
    assert parse_canonical(request.canonical(), context) == request
    return request


def lowered(*reads, context=CONTEXT):
    return lower(parse(*reads, context=context), context)


def entries(program):
    return [entry for found in program.tables.values() for entry in found]


def cosine(x, y):
    return torch.nn.functional.cosine_similarity(x, y, dim=-1)


def formula(read, h):
    """The read as the request language states it, float64 `[tokens, scores]`."""
    weight, bias = read.get("weight"), read.get("bias", 0.0)
    w = VECTORS.tensors[weight].double() if weight else None
    w = w[2] if weight in ("pirate", "ups") else w
    if isinstance(bias, str):
        bias = VECTORS.tensors[bias].double()
        bias = bias[2] if bias.ndim > 1 else bias
    match read["read"]:
        case "probe" | "dot" | "sae":
            p = h @ w.reshape(-1, HIDDEN).T + bias
        case "cosine":
            p = cosine(h, w)
        case "norm":
            p = h.norm(dim=-1)
        case "distance":
            p = (h - w).norm(dim=-1)
        case "tanh_cosine":
            p = cosine(h, torch.tanh((h @ w / (w @ w))[:, None] * w))
    match read.get("function", "relu" if read["read"] == "sae" else None):
        case "sigmoid":
            p = p.sigmoid()
        case "relu" if "threshold" not in read:
            p = p.relu()
        case "relu" | "jump_relu":
            p = torch.where(p > read.get("threshold", 0.0), p, 0.0)
    return p.reshape(len(h), -1)


@pytest.mark.parametrize(
    "read",
    [
        {"read": "probe", "weight": "calm"},
        {"read": "probe", "weight": "pirate", "bias": -0.7, "function": "sigmoid"},
        {"read": "dot", "weight": "pirate"},
        {"read": "cosine", "weight": "calm"},
        {"read": "norm"},
        {"read": "distance", "weight": "pirate"},
        {"read": "tanh_cosine", "weight": "calm"},
        {"read": "sae", "weight": "up"},
        {"read": "sae", "weight": "ups", "bias": "layer_biases"},
        {"read": "sae", "weight": "up", "bias": "biases", "function": "identity"},
        {"read": "sae", "weight": "up", "bias": 0.3, "threshold": 0.4},
        {"read": "sae", "weight": "calm", "function": "jump_relu", "bias": 1},
    ],
    ids=str,
)
def test_each_kernel_does_its_formula(read):
    program = lowered({**read, "layers": 2}, {"read": "capture", "layers": 2})
    outcome = run(program, VECTORS, list(range(TOKENS)), 4, [4, 2])
    h = torch.stack([outcome.captured[0, t] for t in range(TOKENS)]).double()
    torch.testing.assert_close(
        outcome.score.double(), formula(read, h), rtol=1e-5, atol=1e-5
    )


def test_slots_scores_and_functions():
    program = lowered(
        {"read": "norm", "layers": [1, 0], "reduce": "mean", "over": "prompt"},
        {"read": "sae", "name": "s", "weight": "ups", "layers": [0, 3]},
        {"read": "capture", "layers": 0},
        {"read": "cosine", "name": "c", "weight": "calm", "layers": 0},
    )
    none = Scope.NONE
    assert program.scores == (
        *(ScoreInfo(0, 0, None, none), ScoreInfo(0, 1, None, none)),
        *(ScoreInfo(1, 0, i, none) for i in range(RANK)),
        *(ScoreInfo(1, 3, i, none) for i in range(RANK)),
        ScoreInfo(3, 0, None, none),
    )
    norm, s, capture, c = program.functions
    assert (norm.name, norm.reduce, norm.over) == ("reads/0", Reduce.MEAN, Scope.PROMPT)
    assert (s.name, s.layers, s.kind, s.kernel) == ("s", (0, 3), "read", "sae")
    assert (capture.name, c.name, c.over) == ("reads/2", "c", Scope.REQUEST)
    table = program.tables[Table("pre", 1)]
    assert [e.opcode for e in table] == [Opcode.READ] * 4 + [
        Opcode.CAPTURE,
        Opcode.READ,
    ]
    assert [e.slot for e in table] == [0, 2, 3, 4, 0, 8]
    first, _ = VECTORS.rows("ups", 0)
    assert [e.v for e in table[1:4]] == [first, first + 1, first + 2]
    assert {e.function for e in table[1:4]} == {Score.RELU}
    assert not any(e.counter for e in table)
    assert pack_reads(program, 10).tolist() == [0] * 11
    assert program.needs_every_token
    assert not program.changes_kv
    assert program.families == Family.READ | Family.CAPTURE


def test_reads_come_before_writes_and_see_the_writes_of_earlier_sites():
    value = {
        "writes": [
            {"vector": "calm", "layers": 1, "submodule": "residual.pre"},
            {"vector": "calm", "layers": 0},
        ],
        "reads": [
            {"read": "capture", "layers": 1, "submodule": "residual.pre"},
            {"read": "capture", "layers": 0},
        ],
    }
    program = lower(parse_request({"eyesplice": value}, CONTEXT), CONTEXT)
    table = program.tables[Table("pre", 1)]
    assert [(e.opcode, e.u) for e in table if e.opcode is Opcode.CAPTURE] == [
        (Opcode.CAPTURE, 1),
        (Opcode.CAPTURE, 0),
    ]
    assert [e.opcode is Opcode.CAPTURE for e in table] == [True, False, True, False]
    found = run(program, VECTORS, [5], 1, [1]).captured
    change = found[0, 0] - found[1, 0]
    torch.testing.assert_close(change, VECTORS.tensors["calm"], rtol=1e-4, atol=1e-4)


def test_captures():
    program = lowered(
        {**CAPTURE, "when": "last_token"},
        {"read": "router", "layers": 1},
        {"read": "router", "layers": 2, "top_k": 3},
    )
    assert program.captures == (
        CaptureInfo(0, Site(0, "residual.post")),
        CaptureInfo(0, Site(2, "residual.post")),
        CaptureInfo(1, Site(1, "router.logits")),
        CaptureInfo(2, Site(2, "router.logits")),
    )
    assert [f.top_k for f in program.functions] == [0, 2, 3]
    captured = run(program, VECTORS, [3, 1, 4, 1], 3, [4]).captured
    assert set(captured) == {
        *((0, 2), (1, 2)),
        *((c, t) for c in (2, 3) for t in range(4)),
    }
    assert not captured[2, 0][NUM_EXPERTS:].any()


def test_defaults_and_normal_forms():
    (read,) = parse({"read": "probe", "weight": "calm", "layers": "0-1"}).reads
    assert read == Read(
        "probe", (0, 1), "residual.post", weight="calm", bias=0.0, function="identity"
    )
    (read,) = parse({"read": "sae", "weight": "up", "layers": 0, "threshold": 1}).reads
    assert (read.function, read.threshold, read.features) == ("jump_relu", 1.0, RANK)
    alias = {"read": "norm", "submodule": "blocks.-1.hook_mlp_out"}
    assert parse(alias).reads == (Read("norm", (3,), "mlp.post"),)
    assert parse(CAPTURE).reads[0].scores == 0


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ({}, r"reads\[0\] .*add read"),
        ({"read": "prob"}, r"reads\[0\]\.read 'prob' .*write probe \(did you mean"),
        ({"read": "probe"}, r"reads\[0\] .*an object with the key weight"),
        ({"read": "probe", "weight": "calmm"}, r"\.weight 'calmm' .*write calm"),
        ({"read": "probe", "weight": "up"}, r"up of shape \[3, 24\].*4 rows, one per"),
        ({"read": "probe", "weight": "heads"}, r"heads of shape \[16\].*24 elements"),
        ({"read": "probe", "weight": "ups"}, r"shape \[24\] or \[layers, 24\]"),
        (
            {"read": "probe", "weight": "calm", "bias": "x"},
            r"bias 'x' .*or probe, a num",
        ),
        ({"read": "probe", "weight": "calm", "function": "relu"}, r"identity, sigmoid"),
        (
            {"read": "norm", "weight": "calm"},
            r"\.weight 'calm' .*kernels probe, dot, co",
        ),
        ({"read": "norm", "scale": 2}, r"unknown key reads\[0\]\.scale"),
        (
            {"read": "norm", "reduce": "sum"},
            r"\.reduce 'sum' .*none, last, mean or max",
        ),
        (
            {"read": "norm", "over": "all"},
            r"\.over 'all' .*prompt, generated or request",
        ),
        (
            {"read": "capture", "reduce": "mean"},
            r"\.reduce 'mean' .*kernels probe, dot",
        ),
        (
            {"read": "sae", "weight": "up", "bias": "layer"},
            r"\.bias 'layer' .*registered",
        ),
        (
            {"read": "sae", "weight": "up", "bias": "calm"},
            r"\.bias 'calm of 24 numbers' .*3 numbers, one for each row",
        ),
        (
            {"read": "sae", "weight": "up", "function": "relu", "threshold": 1},
            r"\.threshold 1\.0 .*only with the function jump_relu",
        ),
        (
            {"read": "router", "submodule": "mlp.post"},
            r"\.submodule 'mlp\.post' .*router",
        ),
        ({"read": "router", "top_k": 9}, r"\.top_k 9 .*1\.\.8"),
        ({"read": "router", "top_k": 0}, r"\.top_k 0 .*at least 1"),
        (
            {"read": "norm", "submodule": "attention.heads"},
            r"attention\.heads\[1\].*armed",
        ),
        ({"read": "norm", "layers": 7}, r"reads\[0\]\.layers 7"),
        (
            {"read": "norm", "when": "token_in(x)"},
            r"(?s)reads\[0\]\.when .*unknown token",
        ),
    ],
)
def test_a_bad_read_is_refused(read, message):
    with pytest.raises(SpecError, match=message):
        parse({"layers": 1, **read})


def test_scores_are_limited():
    context = request_world.context(max_scores=5, table=VECTORS)
    sae = {"read": "sae", "weight": "up", "layers": 0}
    norm = {"read": "norm", "layers": [0, 1]}
    assert lowered(sae, norm, context=context).scores
    with pytest.raises(SpecError, match=r"reads\[2\] '7 scores .*raise `max_scores`"):
        lowered(norm, {**sae, "layers": 1, "weight": "ups"}, norm, context=context)


@pytest.mark.parametrize(
    ("families", "name", "read"),
    [
        (~Family.READ, "reads", {"read": "norm", "layers": 0}),
        (~Family.CAPTURE, "capture", CAPTURE),
        (~Family.GATE, "gates", {**CAPTURE, "gate": "norm(layer=0) > 1"}),
    ],
)
def test_ops_that_are_not_compiled_in(families, name, read):
    context = request_world.context(families=families, table=VECTORS)
    reads = [{"read": "norm", "layers": 0}, read]
    with pytest.raises(SpecError, match=f"needs the ops {name}' refused") as refused:
        lowered(*reads, context=context)
    # Whoever copies the remedy loses no op that there was.
    there = [op for op in FAMILIES if op != name]
    assert f"into this engine: {', '.join(there)}." in str(refused.value)
    assert f"give `ops: [{', '.join(FAMILIES)}]` in" in str(refused.value)


def test_reads_are_in_the_room_of_a_table():
    context = request_world.context(max_entries=2, table=VECTORS)
    sae = {"read": "sae", "weight": "up", "layers": 0}
    with pytest.raises(SpecError, match=r"reads at mlp\.post\[0\].*'3 entries'"):
        lowered(sae, context=context)
