"""Lowered requests, run by the reference ops, against the formulas in float64."""

import pytest
import torch

from eyesplice import SpecError
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.program import FLOAT32_LIMIT, Entry, pack, pack_clauses
from eyesplice.fx_passes.request import parse_request
from eyesplice.fx_passes.sites import Table
from eyesplice.ops import reference
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    FLOAT_WORDS,
    GENERAL,
    MAX_CLAUSES,
    WORDS,
    Function,
    Header,
    Opcode,
    Stage,
    Word,
)
from eyesplice.ops.work import empty_work
from tests import request_world
from tests.request_world import HEADS_WIDTH, HIDDEN, NUM_LAYERS

TOKENS = 7
VECTORS = request_world.vectors()
CONTEXT = request_world.context(table=VECTORS)


def lowered(*writes, context=CONTEXT):
    request = parse_request({"eyesplice": {"writes": list(writes)}}, context)
    return lower(request, context)


def run_inline(program, table, stage, value, select=-1):
    """`value` after the table's entries, every clause true unless `select` says."""
    result = value.clone()
    reference.inline_(
        result, stage, *op_tables(program.tables[table], len(value), select)
    )
    return result


def op_tables(entries, tokens, select=-1):
    """The table arguments of an op for `tokens` tokens of one program."""
    return (
        torch.ones(tokens, dtype=torch.int32),
        torch.full((tokens,), select, dtype=torch.int32),
        torch.stack([pack([], 16), pack(entries, 16)]),
        VECTORS.bank(),
        list(empty_work(tokens, 2, 32, 4, HIDDEN, torch.float32, "cpu")),
        int(ALL_FAMILIES),
    )


def formula(write, layer, h):
    """The write as the request language states it, float64."""
    v = VECTORS.at(write["vector"], layer)
    h, scale = h.double(), write.get("scale", 1.0)
    unit = v / v.norm()
    p = h @ unit
    match write.get("write", "steering_vector"):
        case "steering_vector":
            return h + scale * v
        case "ablate":
            return h - scale * (h @ v)[:, None] * v / (v @ v)
        case "clamp":
            inside = p.clamp(write.get("lo"), write.get("hi"))
            return h + scale * (inside - p)[:, None] * unit
        case "one_sided":
            above = (p - write.get("offset", 0.0)).relu()
            return h - scale * above[:, None] * unit
    raise AssertionError(write)


CASES = [
    {},
    {"scale": -2.5},
    {"scale": 0},
    {"write": "ablate"},
    {"write": "ablate", "scale": 0.3},
    {"write": "one_sided"},
    {"write": "one_sided", "scale": 2, "offset": 0.7},
    {"write": "one_sided", "offset": -0.7},
    {"write": "clamp", "lo": -0.2, "hi": 0.4},
    {"write": "clamp", "lo": 0.3, "scale": 0.5},
    {"write": "clamp", "hi": -1},
    {"write": "clamp", "lo": 1.5, "hi": 1.5},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vector", ["pirate", "calm"])
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_each_kernel_does_its_formula(case, vector, layer):
    write = {"vector": vector, "layers": layer, **case}
    program = lowered(write)
    assert len(program.tables) == 1
    h = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    result = run_inline(program, Table("pre", layer + 1), Stage.STREAM, h)
    torch.testing.assert_close(
        result.double(), formula(write, layer, h), rtol=1e-5, atol=1e-5
    )


def test_ablate_and_clamp_reach_their_end():
    h = torch.randn(TOKENS, HIDDEN)
    unit = (VECTORS.at("calm", 0) / VECTORS.at("calm", 0).norm()).float()
    for write, lo, hi in (
        ({"write": "ablate"}, 0, 0),
        ({"write": "clamp", "lo": -0.1, "hi": 0.1}, -0.1, 0.1),
        ({"write": "one_sided", "offset": 0.1}, -100, 0.1),
    ):
        program = lowered({"vector": "calm", "layers": 0, **write})
        p = run_inline(program, Table("pre", 1), Stage.STREAM, h) @ unit
        assert (p >= lo - 1e-5).all()
        assert (p <= hi + 1e-5).all()


def test_a_boundary_runs_all_three_values():
    writes = [
        {"vector": "calm", "layers": 1, "submodule": "mlp.pre", "scale": 0.5},
        {
            "vector": "pirate",
            "layers": 1,
            "submodule": "residual.mid",
            "write": "ablate",
        },
        {"vector": "pirate", "layers": 1, "submodule": "attention.post", "scale": 2},
    ]
    program = lowered(*writes)
    table = Table("mid", 1)
    assert list(program.tables) == [table]
    entries = program.tables[table]
    assert [e.stage for e in entries] == [Stage.BRANCH, Stage.STREAM, Stage.NORMED]
    stream, branch = torch.randn(2, TOKENS, HIDDEN)
    weight, result = torch.rand(HIDDEN), stream.clone()
    y = reference.boundary_(
        result,
        branch,
        weight,
        0.0,
        1e-6,
        *op_tables(entries, TOKENS),
    )
    h = stream.double() + formula(writes[2], 1, branch)
    h = formula(writes[1], 1, h)
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(result.double(), h, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        y.double(), formula(writes[0], 1, normed), rtol=1e-5, atol=1e-5
    )


def test_values_narrower_than_the_bank():
    program = lowered({"vector": "heads", "layers": 0, "submodule": "attention.heads"})
    z = torch.randn(TOKENS, HEADS_WIDTH)
    result = run_inline(program, Table("heads", 0), Stage.BRANCH, z)
    torch.testing.assert_close(result, z + VECTORS.tensors["heads"])


def test_the_order_of_writes_is_the_order_of_effects():
    steer = {"vector": "calm", "layers": 0}
    ablate = {"vector": "calm", "layers": 0, "write": "ablate"}
    h = torch.randn(TOKENS, HIDDEN)
    for writes in ([steer, ablate], [ablate, steer]):
        expected = h
        for write in writes:
            expected = formula(write, 0, expected)
        result = run_inline(lowered(*writes), Table("pre", 1), Stage.STREAM, h)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


def test_residual_post_comes_before_residual_pre_of_the_next_layer():
    program = lowered(
        {"vector": "calm", "layers": 2, "submodule": "residual.pre", "scale": 1},
        {"vector": "calm", "layers": 2, "submodule": "attention.pre", "scale": 2},
        {"vector": "calm", "layers": 1, "submodule": "residual.post", "scale": 3},
        {"vector": "calm", "layers": 1, "submodule": "mlp.post", "scale": 4},
        {"vector": "calm", "layers": 2, "submodule": "residual.pre", "scale": 5},
        {"vector": "calm", "layers": 1, "submodule": "residual.post", "scale": 6},
    )
    assert list(program.tables) == [Table("pre", 2)]
    assert [e.gain for e in program.tables[Table("pre", 2)]] == [4, 3, 6, 1, 5, 2]


def test_layers_use_their_own_rows():
    program = lowered({"vector": "pirate", "layers": "all"})
    assert {table: entries[0].u for table, entries in program.tables.items()} == {
        Table("pre", layer + 1): VECTORS.row("pirate", layer)
        for layer in range(NUM_LAYERS)
    }


def test_conditions_are_shared_and_choose_tokens():
    program = lowered(
        {"vector": "calm", "layers": 0, "when": "prompt"},
        {"vector": "calm", "layers": 1, "when": "generated"},
        {"vector": "calm", "layers": 2, "when": "prompt"},
    )
    masks = {table.layer: e[0].clause_mask for table, e in program.tables.items()}
    assert masks == {1: 0b01, 2: 0b10, 3: 0b01}
    assert pack_clauses(program.clauses)[:3, 0].tolist() == [2, 3, 0]
    h = torch.randn(TOKENS, HIDDEN)
    for select, acts in ((0b01, True), (0b10, False)):
        result = run_inline(program, Table("pre", 1), Stage.STREAM, h, select)
        assert torch.equal(result, h) != acts


def test_the_32nd_condition_works():
    writes = [
        {"vector": "calm", "layers": i % NUM_LAYERS, "when": f"positions({i})"}
        for i in range(MAX_CLAUSES)
    ]
    program = lowered(*writes)
    h = torch.randn(TOKENS, HIDDEN)
    result = run_inline(program, Table("pre", 4), Stage.STREAM, h, select=-(2**31))
    expected = h.double() + VECTORS.at("calm", 0)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(SpecError, match=r"writes\[32\]\.when 'prompt' .*at most 32"):
        lowered(*writes, {"vector": "calm", "layers": 0, "when": "prompt"})


def test_program_digest_is_the_requests():
    write = {"writes": [{"vector": "calm", "layers": 0}]}
    request = parse_request({"eyesplice": write}, CONTEXT)
    assert lower(request, CONTEXT).digest == request.digest(VECTORS)
    assert not lower(parse_request({"eyesplice": {}}, CONTEXT), CONTEXT).tables


@pytest.mark.parametrize("kernel", ["ablate", "one_sided", "clamp"])
@pytest.mark.parametrize("vector", ["zero", "tiny"])
def test_a_vector_without_direction_is_refused(kernel, vector):
    bound = {"lo": 0} if kernel == "clamp" else {}
    with pytest.raises(SpecError, match=rf"writes\[0\]\.vector '{vector} with norm"):
        lowered({"vector": vector, "layers": 0, "write": kernel, **bound})
    assert lowered({"vector": vector, "layers": 0}).tables


def test_a_gain_beyond_fp32_is_refused():
    table = request_world.Vectors({"small": torch.full((HIDDEN,), 1e-18)})
    context = request_world.context(table=table)
    write = {"vector": "small", "layers": 0, "write": "ablate"}
    assert lowered(write, context=context).tables
    with pytest.raises(SpecError, match=r"writes\[0\]\.scale 100000.0 .*fp32"):
        lowered({**write, "scale": 1e5}, context=context)


@pytest.mark.parametrize(
    "writes",
    [
        [{"scale": 3.4e38}],
        [{"scale": -1e9}],
        [{"scale": 6e7, "layers": 0}, {"scale": -6e7, "layers": 1}],
        [{"write": "ablate", "scale": 1e7}],
        [{"write": "ablate", "scale": -2000.0, "layers": [0, 1]}],
        [{"write": "one_sided", "scale": 1.0, "offset": -1e9}],
        [{"write": "clamp", "lo": 1e9}],
    ],
    ids=str,
)
def test_writes_that_could_overflow_are_refused(writes):
    ones = request_world.Vectors({"ones": torch.full((HIDDEN,), HIDDEN**-0.5)})
    context = request_world.context(table=ones)
    base = {"vector": "ones", "layers": 0}
    with pytest.raises(SpecError, match=r"writes\[\d\]\.scale .* add at most"):
        lowered(*({**base, **write} for write in writes), context=context)
    modest = [{**base, **write, "scale": 2.0} for write in writes[:1]]
    for write in modest:
        write.pop("offset", None)
        if write.get("write") == "clamp":
            write["lo"] = 1e6
    assert lowered(*modest, context=context).tables


def test_too_many_entries_name_the_sites_and_the_limit():
    context = request_world.context(max_entries=3)
    after = {"vector": "calm", "layers": 0}
    before = {**after, "layers": 1, "submodule": "residual.pre"}
    assert lowered(after, after, before, context=context).tables
    with pytest.raises(SpecError) as caught:
        lowered(after, after, before, before, context=context)
    message = str(caught.value)
    sites = "mlp.post[0], residual.post[0], residual.pre[1], attention.pre[1]"
    assert sites in message
    assert "4 entries" in message
    assert "at most 3 per request (max_entries)" in message


def test_pack_lays_out_header_and_words():
    entries = [
        Entry(
            stage=Stage.NORMED,
            opcode=Opcode.ADD,
            u=3,
            clause_mask=1 << 31,
            gain=FLOAT32_LIMIT,
        ),
        Entry(
            stage=Stage.BRANCH,
            opcode=Opcode.RANK1,
            function=Function.CLIP,
            u=1,
            v=2,
            clause_mask=2**32 - 1,
            gain=-1.5,
            in_scale=0.5,
            bias=-0.25,
            lo=-FLOAT32_LIMIT,
            hi=8,
        ),
    ]
    packed = pack(entries, max_entries=4)
    assert packed.shape == (5, WORDS)
    assert packed.dtype == torch.int32
    assert packed[0, list(Header)].tolist() == [1, 1, 2, 1, 0, 1, GENERAL, 0, -1]
    assert packed[1, : Word.GAIN].tolist() == [2, 4, 1, 2, -1]
    floats = packed.view(torch.float32)
    assert floats[1, list(FLOAT_WORDS)].tolist() == pytest.approx(
        [-1.5, 0.5, -0.25, -FLOAT32_LIMIT, 8]
    )
    assert packed[2, : Word.GAIN].tolist() == [1, 0, 3, 0, -(2**31)]
    assert torch.isfinite(floats[1:, Word.GAIN : Word.HI + 1]).all()
    assert not packed[3:].any()
    assert not pack([], 4).any()
    one = Entry(stage=Stage.STREAM, opcode=Opcode.ADD, u=3, clause_mask=1, gain=1.0)
    assert pack([one], 4)[0, [Header.SIMPLE, Header.ADDS]].tolist() == [1, 1]
