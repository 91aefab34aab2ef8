"""Users' own ops in the graph: the same values as by hand, wherever the op stands."""

import pytest
import torch

from eyesplice.fx_passes.custom_ops import find_op, schema_of
from eyesplice.fx_passes.custom_sites import CustomSite, CustomSites
from eyesplice.fx_passes.program import Entry, pack
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.ops import contracts
from eyesplice.ops.layout import Opcode, Stage
from tests import user_ops  # noqa: F401 - registers the ops
from tests.toy_graph import (
    LAYERS,
    SUBMODULES,
    TOKENS,
    AddingLayer,
    FusedLayer,
    GemmaLayer,
    Model,
    Spliced,
    table_of,
)

IDS = torch.arange(TOKENS)
ACTIVE = torch.tensor([False, True, False, True, True])
BEND = "userops::bend"


def custom(*places, op=BEND, rows=2):
    """An own op at each (layer, submodule)."""
    sites = [
        CustomSite(
            i, Site(*place), op, schema_of(op), "app", "app/w" if rows else None, rows
        )
        for i, place in enumerate(places)
    ]
    return CustomSites(tuple(sites))


def switch_on(model, gain=0.7):
    """Let every own op act on the ACTIVE tokens."""
    entry = Entry(stage=Stage.BRANCH, opcode=Opcode.CUSTOM, clause_mask=1, gain=gain)
    for one in model.plan.custom:
        model.programs[one.table].copy_(torch.stack([pack((), 4), pack((entry,), 4)]))
    model.occupy(ACTIVE, *(one.table for one in model.plan.custom))


def bent(value, weight, gain=0.7):
    step = torch.tanh(value @ weight.T) @ weight
    return torch.where(ACTIVE[:, None], value + gain * step, value)


def by_hand(model, edits):
    """The model with functions run at (layer, submodule), in plain torch."""

    def at(layer, submodule, value):
        for fn in edits.get((layer, submodule), ()):
            value = fn(value)
        return value

    scale = 0.5 if isinstance(model.layers[0], AddingLayer) else 1.0
    h = model.embed(IDS)
    for number, layer in enumerate(model.layers):
        if number:
            h = at(number - 1, "residual.post", h)
        h = at(number, "residual.pre", h)
        x = layer.attn(at(number, "attention.pre", layer.ln1(h)))
        h = at(number, "residual.mid", h + at(number, "attention.post", x))
        x = layer.mlp(at(number, "mlp.pre", layer.ln2(h)))
        h = h + scale * at(number, "mlp.post", x)
    return model.norm(at(LAYERS - 1, "residual.post", h))


def edits_of(model):
    edits = {}
    for one in model.plan.custom:
        weight = model.weights[one.number]
        place = (one.site.layer, one.site.submodule)
        edits.setdefault(place, []).append(lambda v, w=weight: bent(v, w))
    return edits


@pytest.mark.parametrize("layer", [FusedLayer, GemmaLayer, AddingLayer])
@pytest.mark.parametrize("number", range(LAYERS))
@pytest.mark.parametrize("submodule", SUBMODULES)
def test_an_own_op_acts_at_its_site_and_only_on_its_tokens(layer, number, submodule):
    model = Model(layer, custom=custom((number, submodule)))
    spliced = Spliced(model)
    with torch.no_grad():
        plain, expected = by_hand(model, {}), by_hand(model, edits_of(model))
        torch.testing.assert_close(spliced(IDS), plain, rtol=0, atol=1e-6)
    switch_on(model)
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-5)
    assert ((expected - plain).abs().amax(dim=-1) > 1e-3).tolist() == ACTIVE.tolist()
    assert len(spliced.calls(find_op(BEND))) == spliced.report.num_custom_ops == 1
    assert len(spliced.calls(contracts.custom_gain)) == 1
    rows = {row.site: row for row in spliced.report.rows}
    assert rows.pop(Site(number, submodule)).custom == (BEND,)
    assert not any(row.custom for row in rows.values())
    assert not spliced.report.missing


def test_what_is_spliced_around_an_op_on_the_stream():
    spliced = Spliced(Model(FusedLayer, custom=custom((0, "residual.mid"))))
    spliced(IDS)
    boundary, inline = contracts.boundary_, contracts.inline_
    targets = [n.target for n in spliced.graph.nodes if n.op == "call_function"]
    first = targets.index(inline)
    assert targets[first : first + 6] == [
        inline,
        torch.add,
        inline,
        contracts.custom_gain,
        find_op(BEND),
        boundary,
    ]
    assert spliced.report.counts == {
        "boundary": 2 * LAYERS + 1,
        "inline": 2,
        "custom": 1,
        "hooks": 0,
    }
    # mid[0] neither waits nor is waited for; layer 1 is as ever.
    ops = spliced.calls(boundary)
    assert [node.args[1] is None for node in ops] == [True, True, False, False, False]
    assert [node.args[8] for node in ops] == [False, False, False, True, False]
    assert [node.args[7] is not None for node in ops] == [False] * 4 + [True]
    forms = {str(row.site): row.form for row in spliced.report.rows}
    cut = {"attention.post[0]", "residual.mid[0]"}
    assert {site for site, form in forms.items() if form == "inline"} == cut


@pytest.mark.parametrize("submodule", ["attention.post", "mlp.pre"])
def test_beside_an_op_on_the_branch_or_the_normed_value_adds_are_still_deferred(
    submodule,
):
    model = Model(FusedLayer, custom=custom((0, submodule)))
    spliced = Spliced(model)
    spliced(IDS)
    ops = spliced.calls(contracts.boundary_)
    assert [node.args[8] for node in ops] == [False, True, False, True, False]
    assert len(spliced.calls(contracts.inline_)) == (submodule == "attention.post")


def test_without_own_ops_nothing_is_added():
    spliced = Spliced(Model(FusedLayer))
    spliced(IDS)
    assert spliced.report.num_custom_ops == spliced.report.num_inline_ops == 0
    assert not spliced.calls(contracts.custom_gain)


EVERYWHERE = [(i, s) for i in range(LAYERS) for s in SUBMODULES]


@pytest.mark.parametrize("layer", [FusedLayer, AddingLayer])
def test_own_ops_at_every_site_twice(layer):
    model = Model(layer, custom=custom(*EVERYWHERE, *EVERYWHERE))
    switch_on(model, 0.2)
    spliced = Spliced(model)
    edits = {
        place: [lambda v, w=model.weights[one.number]: bent(v, w, 0.2) for one in ones]
        for place in EVERYWHERE
        for ones in [[c for c in model.plan.custom if c.site == Site(*place)]]
    }
    with torch.no_grad():
        expected = by_hand(model, edits)
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-4)
    assert spliced.report.num_custom_ops == 4 * len(SUBMODULES)


@pytest.mark.parametrize("layer", [FusedLayer, AddingLayer])
@pytest.mark.parametrize("submodule", SUBMODULES)
def test_entries_of_the_same_value_come_before_the_own_op(layer, submodule):
    model = Model(layer, custom=custom((1, submodule)))
    switch_on(model)
    table, stage = Site(1, submodule).table
    own = model.plan.custom.table_of(table, stage)
    model.programs[own].copy_(table_of(stage, 1.5))
    model.occupy(ACTIVE, own, *(one.table for one in model.plan.custom))
    added = 1.5 * model.bank[1] * ACTIVE[:, None]
    edits = {(1, submodule): [lambda v: v + added, *edits_of(model)[1, submodule]]}
    with torch.no_grad():
        expected = by_hand(model, edits)
    torch.testing.assert_close(Spliced(model)(IDS), expected, rtol=0, atol=1e-5)


def test_an_op_on_the_heads():
    model = Model(
        FusedLayer, wanted=("attention.heads",), custom=custom((0, "attention.heads"))
    )
    (weight,) = model.weights

    def heads(x):
        return model.layers[0].attn.o_proj(bent(2 * x, weight))

    spliced = Spliced(model)
    plain = spliced(IDS)
    switch_on(model)
    model.layers[0].attn.forward, kept = heads, model.layers[0].attn.forward
    with torch.no_grad():
        expected = by_hand(model, {})
    model.layers[0].attn.forward = kept
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-5)
    assert ((expected - plain).abs().amax(dim=-1) > 1e-3).tolist() == ACTIVE.tolist()


def test_an_op_at_the_embedding_does_not_write_to_an_input():
    model = Model(FusedLayer, custom=custom((0, "residual.pre")))
    embeds = model.embed(IDS).detach()
    before = embeds.clone()
    with torch.no_grad():
        expected = by_hand(model, edits_of(model))
    switch_on(model)
    found = Spliced(model)(None, inputs_embeds=embeds)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.equal(embeds, before)


def test_a_branch_that_is_read_elsewhere_is_copied():
    class Reads(FusedLayer):
        """Its MLP sees the attention's output as well."""

        def forward(self, x, residual):
            if residual is None:
                residual, x = x, self.ln1(x)
            else:
                x, residual = self.ln1(x, residual)
            branch = self.attn(x)
            x, residual = self.ln2(branch, residual)
            return self.mlp(x) + branch, residual

    model = Model(Reads, custom=custom((0, "attention.post")))
    with torch.no_grad():
        plain = model(IDS)
    spliced = Spliced(model)
    torch.testing.assert_close(spliced(IDS), plain, rtol=0, atol=1e-6)
    assert len(spliced.calls(torch.clone)) == 1


def test_an_op_without_a_tensor_gets_an_empty_one():
    model = Model(
        FusedLayer, custom=custom((0, "mlp.pre"), op="userops::drift", rows=0)
    )
    switch_on(model)
    edits = {(0, "mlp.pre"): [lambda v: v + 0.7 * ACTIVE[:, None]]}
    with torch.no_grad():
        expected = by_hand(model, edits)
    torch.testing.assert_close(Spliced(model)(IDS), expected, rtol=0, atol=1e-5)


def test_the_tables_that_own_ops_bring():
    found = custom((1, "residual.mid"), (0, "mlp.post"), (0, "attention.pre"))
    mid, pre = Table("mid", 1), Table("pre", 1)
    assert [found.table_of(mid, stage).part for stage in Stage] == [1, 2, 0]
    assert [found.table_of(pre, stage).part for stage in Stage] == [1, 0, 0]
    assert [found.table_of(Table("pre", 0), stage).part for stage in Stage] == [0, 0, 0]
    assert [one.table for one in found] == [
        Table("custom", 1, 0),
        Table("custom", 1, 1),
        Table("custom", 0, 2),
    ]
    both = custom((2, "residual.pre"), (1, "residual.post"))
    assert [c.number for c in both.at(Table("pre", 2), Stage.STREAM)] == [1, 0]
