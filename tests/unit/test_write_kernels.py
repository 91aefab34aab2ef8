"""The write kernels beyond one direction: formulas, experts, bounds and flags."""

import pytest
import torch

from eyesplice import SpecError
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_canonical, parse_request
from eyesplice.fx_passes.sites import Table
from eyesplice.ops import reference
from eyesplice.ops.layout import PRESERVE_NORM, Family, Opcode, Stage
from tests import request_world
from tests.request_world import HIDDEN, NUM_EXPERTS, NUM_LAYERS, RANK
from tests.unit.test_lowering import op_tables

TOKENS = 7
VECTORS = request_world.vectors()
CONTEXT = request_world.context(table=VECTORS)
ROUTER = {"write": "router", "activate": [4, 1], "deactivate": [6]}
AFFINE = {"write": "affine", "u": "ups", "v": "down"}


def parse(*writes, context=CONTEXT):
    request = parse_request({"eyesplice": {"writes": list(writes)}}, context)
    assert parse_canonical(request.canonical(), context) == request
    return request


def lowered(*writes, context=CONTEXT):
    return lower(parse(*writes, context=context), context)


def formula(write, h):
    """The write as the request language states it, float64, at layer 2."""
    scale = write.get("scale", 1.0)

    def tensor(key, axes):
        found = VECTORS.tensors[write[key]].double()
        if found.ndim < axes:
            return found[None]
        return found[2] if found.ndim > axes else found

    match write["write"]:
        case "replace":
            return h + scale * (tensor("vector", 1) - h)
        case "mask":
            return h + scale * h * tensor("vector", 1)
        case "feature_clamp":
            p = h @ tensor("weight", 1) + write.get("bias", 0.0)
            a = torch.where(p > write.get("threshold", 0.0), p, 0.0)
            change = write.get("value", 0.0) - a
            return h + scale * change[:, None] * tensor("vector", 1)
        case "affine":
            p = h @ tensor("v", 2).T
            if "bias" in write:
                p = p + tensor("bias", 1)
            p = {
                "identity": lambda: p,
                "relu": p.relu,
                "sigmoid": p.sigmoid,
                "step": (p >= 0).double,
            }[write.get("function", "identity")]()
            return h + scale * p @ tensor("u", 2)
    raise AssertionError(write)


@pytest.mark.parametrize(
    "write",
    [
        {"write": "replace", "vector": "calm"},
        {"write": "replace", "vector": "pirate", "scale": 0.3},
        {"write": "mask", "vector": "pirate", "scale": -0.5},
        {"write": "feature_clamp", "vector": "pirate", "weight": "calm"},
        {
            "write": "feature_clamp",
            "vector": "calm",
            "weight": "pirate",
            "bias": 0.2,
            "threshold": 0.7,
            "value": 3,
            "scale": 0.5,
        },
        AFFINE,
        {**AFFINE, "bias": "layer_biases", "function": "relu", "scale": 2},
        {**AFFINE, "u": "up", "v": "downs", "bias": "biases", "function": "sigmoid"},
        {**AFFINE, "u": "up", "function": "step"},
        {**AFFINE, "u": "calm", "v": "calm", "scale": -0.1},
        {"write": "mask", "vector": "calm", "preserve_norm": True},
        {**AFFINE, "preserve_norm": True},
    ],
    ids=str,
)
def test_each_kernel_does_its_formula(write):
    program = lowered({**write, "layers": 2})
    ((table, entries),) = program.tables.items()
    assert table == Table("pre", 3)
    h = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    result = h.clone()
    reference.inline_(result, Stage.STREAM, *op_tables(entries, TOKENS))
    expected = formula(write, h.double())
    if write.get("preserve_norm"):
        assert entries[0].flags == PRESERVE_NORM
        assert program.families & Family.PRESERVE_NORM
        before = h.double().norm(dim=-1, keepdim=True)
        expected *= before / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_router_logits_are_edited():
    program = lowered({**ROUTER, "layers": [1, 2], "epsilon": 0.5})
    assert list(program.tables) == [Table("router", 1), Table("router", 2)]
    (entry,) = program.tables[Table("router", 1)]
    assert (entry.opcode, entry.gain) == (Opcode.ROUTER, 0.5)
    logits = torch.randn(
        TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(1)
    )
    result = logits.clone()
    reference.inline_(result, Stage.BRANCH, *op_tables([entry], TOKENS))
    expected = logits.log_softmax(-1)
    top, bottom = expected.amax(-1) + 0.5, expected.amin(-1) - 0.5
    expected[:, 1], expected[:, 4], expected[:, 6] = top, top, bottom
    torch.testing.assert_close(result, expected)


def test_experts_in_lists_and_objects():
    (write,) = parse({**ROUTER, "layers": "1-2"}).writes
    assert (write.activate, write.deactivate) == (((1, 4), (1, 4)), ((6,), (6,)))
    assert (write.submodule, write.epsilon) == ("router.logits", 0.01)
    value = {"activate": {"-1": [4, 1]}, "deactivate": {"0": [3], "3": [6]}}
    (write,) = parse({"write": "router", **value}).writes
    assert write.layers == (0, 3)
    assert (write.activate, write.deactivate) == (((), (1, 4)), ((3,), (6,)))
    (write,) = parse({"write": "router", **value, "deactivate": [7]}).writes
    assert (write.layers, write.deactivate) == ((3,), ((7,),))
    most = {"layers": 0, "activate": [1, 4], "deactivate": [0, 2, 3, 5, 6, 7]}
    (write,) = parse({"write": "router", **most}).writes
    assert write.deactivate == ((0, 2, 3, 5, 6, 7),)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        ({"write": "affine"}, r"writes\[0\] .*add u"),
        ({**AFFINE, "v": "nothing"}, r"\.v 'nothing' .*a registered vector"),
        (
            {**AFFINE, "v": "calm"},
            r"\.v 'calm of 1 rows' .*3, as many as the rows of u",
        ),
        ({**AFFINE, "bias": "calm"}, r"\.bias 'calm of 24 numbers' .*3, as many"),
        ({**AFFINE, "bias": 2}, r"\.bias 2\.0 .*the name of a registered tensor"),
        (
            {**AFFINE, "function": "clip"},
            r"\.function 'clip' .*identity, relu, sigmoid",
        ),
        (
            {**AFFINE, "vector": "calm"},
            r"\.vector 'calm' .*only with the kernels steer",
        ),
        ({"write": "feature_clamp", "vector": "calm"}, r"writes\[0\] .*add weight"),
        (
            {**ROUTER, "scale": 2},
            r"\.scale 2\.0 .*kernels steering_vector, ablate.*not with router",
        ),
        ({**ROUTER, "preserve_norm": True}, r"\.preserve_norm True .*only with the"),
        (
            {**ROUTER, "submodule": "mlp.pre"},
            r"\.submodule 'mlp\.pre' .*router\.logits",
        ),
        ({**ROUTER, "epsilon": -1}, r"\.epsilon -1\.0 .*at least 0"),
        ({**ROUTER, "activate": [8]}, r"\.activate 8 .*experts 0\.\.7 of this model"),
        ({**ROUTER, "activate": [-1]}, r"\.activate -1 .*experts 0\.\.7"),
        (
            {**ROUTER, "activate": [6]},
            r"\.activate 6 .*layer 1 does not deactivate too",
        ),
        ({**ROUTER, "activate": [0, 1, 2]}, r"'3 experts at layer 1' .*at most 2, the"),
        ({**ROUTER, "activate": [True]}, r"\.activate \[True\] .*a list of expert"),
        ({**ROUTER, "activate": {"9": [1]}}, r"writes\[0\]\.activate 9 .*0\.\.3"),
        (
            {"write": "router", "layers": 1, "deactivate": [0, 1, 2, 3, 4, 5, 7]},
            r"\.deactivate '7 of 8 experts at layer 1' .*at most 6: a token goes to 2",
        ),
        ({**ROUTER, "activate": {"2": [1]}}, r"\.layers 1 .*experts named for layer 2"),
        (
            {**ROUTER, "activate": {"1": [1], "0-1": [2]}, "layers": None},
            r"activate\.0-1 .*each layer once; layer 1 has",
        ),
        (
            {"write": "router"},
            r"\.activate \[\] .*experts to activate or deactivate at",
        ),
    ],
)
def test_a_bad_write_is_refused(write, message):
    with pytest.raises(SpecError, match=message):
        parse({"layers": 1, **write})


def test_a_mask_that_the_bank_lacks_is_refused():
    with pytest.raises(SpecError, match=r"writes\[0\]\.mask .*put it in an app"):
        lowered({"write": "router", "activate": [0], "layers": 1})


def test_a_dense_model_has_no_experts():
    context = request_world.context(num_experts=0)
    with pytest.raises(SpecError, match="this one has no experts"):
        parse({**ROUTER, "layers": 1}, context=context)


def test_sane_writes_at_every_layer_stay_within_the_bounds():
    orthonormal = torch.linalg.qr(torch.randn(HIDDEN, RANK))[0].T
    table = request_world.Vectors(
        {"r": orthonormal, "mask": (torch.arange(HIDDEN) % 3 == 0).float()}
    )
    context = request_world.context(table=table, max_entries=64)
    everywhere = [
        {"write": "mask", "vector": "mask", "scale": -1.0},
        {"write": "affine", "u": "r", "v": "r", "scale": -1.0},
    ] * 12
    writes = [{**write, "layers": "all"} for write in everywhere]
    assert len(lowered(*writes, context=context).tables) == NUM_LAYERS


@pytest.mark.parametrize(
    "write",
    [
        {"write": "replace", "vector": "ones", "scale": 1e8},
        {"write": "mask", "vector": "ones", "scale": 2e7},
        {"write": "mask", "vector": "ones", "scale": -300, "layers": "all"},
        {"write": "feature_clamp", "vector": "ones", "weight": "ones", "value": 1e8},
        {"write": "feature_clamp", "vector": "ones", "weight": "ones", "scale": 1e6},
        {"write": "affine", "u": "ones", "v": "ones", "scale": 1e6},
        {
            "write": "affine",
            "u": "ones",
            "v": "ones",
            "scale": -1e6,
            "function": "relu",
        },
        {"write": "affine", "u": "ones", "v": "ones", "scale": 1e8, "function": "step"},
        {"write": "affine", "u": "ones", "v": "ones", "bias": "high"},
        {"write": "router", "activate": [1], "epsilon": 1e9},
    ],
    ids=str,
)
def test_writes_that_could_overflow_are_refused(write):
    table = request_world.Vectors(
        {"ones": torch.full((HIDDEN,), 2.0), "high": torch.tensor([1e9])}
    )
    context = request_world.context(table=table)
    field = "epsilon" if write["write"] == "router" else "scale"
    with pytest.raises(SpecError, match=rf"writes\[0\]\.{field} .* add at most"):
        lowered({"layers": 0, **write}, context=context)


def test_the_norm_of_a_low_rank_change_is_exact():
    from eyesplice.fx_passes.overflow import _norm_of_sum

    u, v = torch.randn(2, RANK, HIDDEN, dtype=torch.float64)
    whole = torch.eye(HIDDEN, dtype=torch.float64) - 0.7 * u.T @ v
    expected = torch.linalg.matrix_norm(whole, ord=2)
    assert _norm_of_sum(-0.7, u, v) == pytest.approx(float(expected))
    assert _norm_of_sum(-1.0, u[:1], u[:1] / u[0].norm() ** 2) == pytest.approx(1.0)
