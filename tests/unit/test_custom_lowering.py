"""Own ops in requests: which tables their entries go to, and what is refused."""

import pytest
import torch

from eyesplice import SpecError
from eyesplice.fx_passes.context import DeployedApp
from eyesplice.fx_passes.custom_ops import schema_of
from eyesplice.fx_passes.custom_sites import CustomSite, CustomSites
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_canonical, parse_request
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.ops.layout import Family, Opcode, Stage
from tests import request_world, user_ops  # noqa: F401 - registers the ops
from tests.request_world import HIDDEN, NUM_LAYERS

BEND, DRIFT = "userops::bend", "userops::drift"
VECTORS = request_world.Vectors(
    {
        **request_world.vectors().tensors,
        "own/w": torch.randn(2, HIDDEN),
        "own/layered": torch.randn(NUM_LAYERS, 2, HIDDEN),
        "own/narrow": torch.randn(2, HIDDEN - 1),
    }
)
MID = {"layers": [1], "submodule": "residual.mid"}
APP = DeployedApp(
    "own",
    (
        {"read": "probe", "name": "h", "weight": "w1", **MID},
        {
            "write": BEND,
            "name": "a",
            "weight": "w",
            "scale": 2.0,
            **MID,
            "gate": "h >= 0",
        },
        {"write": BEND, "name": "b", "weight": "w", "scale": 3.0, **MID},
        {"write": DRIFT, "layers": [1, 2], "submodule": "mlp.pre", "when": "generated"},
    ),
)
SITES = [
    (Site(1, "residual.mid"), BEND, "own/w"),
    (Site(1, "residual.mid"), BEND, "own/w"),
    (Site(1, "mlp.pre"), DRIFT, None),
    (Site(2, "mlp.pre"), DRIFT, None),
]
CUSTOM = CustomSites(
    tuple(
        CustomSite(i, site, op, schema_of(op), "own", weight, 2 if weight else 0)
        for i, (site, op, weight) in enumerate(SITES)
    )
)


def context(*functions, custom=CUSTOM, **others):
    table = request_world.Vectors({**VECTORS.tensors, "own/w1": torch.randn(HIDDEN)})
    app = DeployedApp("own", functions) if functions else APP
    apps = {"own": app, "other": DeployedApp("other", app.functions)}
    return request_world.context(table=table, apps=apps, custom=custom, **others)


def lowered(spec, where=None):
    where = where or context()
    request = parse_request({"eyesplice": spec}, where)
    program = lower(request, where)
    # What the worker makes of the canonical text is the same program.
    assert lower(parse_canonical(request.canonical(), where), where) == program
    return program


def test_the_entries_of_an_app():
    program = lowered("own")
    mid_h = Table("mid", 1, 1 + Stage.STREAM)
    assert [e.opcode for e in program.tables[mid_h]] == [Opcode.READ, Opcode.COMPARE]
    first, second = (program.tables[Table("custom", 1, i)] for i in (0, 1))
    assert [(e.opcode, e.gain) for e in (*first, *second)] == [
        (Opcode.CUSTOM, 2.0),
        (Opcode.CUSTOM, 3.0),
    ]
    # The gate's own bit: its read stands in front of it, in the table cut off.
    assert first[0].clause_mask == program.tables[mid_h][1].bit
    assert (first[0].counter, second[0].counter) == (2, 3)
    one, two = (program.tables[Table("custom", i, i + 1)] for i in (1, 2))
    assert (one[0].counter, two[0].counter) == (4, 0)
    assert program.changes_kv and program.needs_every_token
    assert program.depends_on_prompt_length
    assert len(program.tables) == 5
    assert program.families == Family.READ | Family.GATE


def test_built_in_functions_of_a_cut_boundary_move_with_their_stage():
    sites = ("attention.post", "residual.mid", "mlp.pre")
    writes = [{"vector": "calm", "layers": [1], "submodule": s} for s in sites]
    tables = lowered({"apps": {}, "writes": writes}).tables
    assert list(tables) == [Table("mid", 1, 1), Table("mid", 1, 2), Table("mid", 1)]
    plain = lowered(
        {"apps": {}, "writes": writes}, context(custom=CustomSites())
    ).tables
    assert list(plain) == [Table("mid", 1)]


def test_a_latch_still_needs_an_earlier_boundary():
    write = {"vector": "calm", **MID, "gate": "latch(x > 0)"}
    read = {"read": "norm", "name": "x", "layers": [1], "submodule": "attention.post"}
    with pytest.raises(SpecError, match="earlier boundary"):
        lowered({"apps": {}, "reads": [read], "writes": [write]})


def test_scales_can_be_overridden():
    overrides = {"functions": {"b": {"scale": -1.0}, "3": {"scale": 0.5}}}
    tables = lowered({"apps": {"own": overrides}}).tables
    gains = [tables[custom.table][0].gain for custom in CUSTOM]
    assert gains == [2.0, -1.0, 0.5, 0.5]


def test_a_requests_own_write_takes_what_is_free():
    write = {"write": BEND, "weight": "own/w", "scale": 9.0, **MID}
    tables = lowered({"apps": {}, "writes": [write, write]}).tables
    assert list(tables) == [Table("custom", 1, 0), Table("custom", 1, 1)]
    with pytest.raises(SpecError, match=r"writes\[0\].*each once: userops::bend"):
        lowered({"apps": {"own": {}}, "writes": [write]})


@pytest.mark.parametrize(
    ("write", "said"),
    [
        ({"write": BEND, "weight": "own/w", "layers": [2]}, "at this site.*restart"),
        ({"write": BEND, **MID}, r"\(no tensor\) at residual.mid\[1\]"),
        ({"write": BEND, "weight": "own/layered", **MID}, "own/layered"),
        (
            {"write": "userops::fails", **MID},
            "those of the deployed apps: userops::bend",
        ),
        ({"write": "torch::nn", **MID}, "put it into an app"),
        (
            {"write": BEND, "weight": "own/w", **MID, "preserve_norm": True},
            "preserve_norm",
        ),
        ({"write": BEND, "vector": "own/w", **MID}, "vector"),
        ({"write": BEND, "weight": "nothing", **MID}, "registered vector"),
    ],
)
def test_what_no_app_has_brought_is_refused(write, said):
    with pytest.raises(SpecError, match=said):
        lowered({"apps": {}, "writes": [write]})


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ({"write": "userops::bends", **MID}, "own/0.write .*write userops::bend "),
        ({"write": "nolib::op", **MID}, "there is nothing.*`op_modules`"),
        ({"write": "userops::functional", **MID}, "mutates_args"),
        ({"write": BEND, "weight": "narrow", **MID}, "rows of 24 elements"),
    ],
)
def test_an_apps_op_that_cannot_run_is_refused(function, said):
    with pytest.raises(SpecError, match=said):
        lowered("own", context(function))


def test_an_app_has_its_own_ops_and_not_anothers():
    drift = APP.functions[3]
    with pytest.raises(
        SpecError, match=r"other/0.write .*userops::drift .no tensor. of own"
    ):
        lowered("other", context(drift))
    assert len(lowered({"apps": {"own": {}}}, context(drift)).tables) == 2
