"""The pass on small Dynamo graphs, run before and after: same values, told by name."""

import dataclasses
import operator

import pytest
import torch
from torch import nn

from eyesplice.fx_passes.sites import Site
from eyesplice.fx_passes.splice_pass import spliced_calls
from eyesplice.ops import contracts
from eyesplice.ops.layout import Stage
from tests.toy_graph import (
    HIDDEN,
    LAYERS,
    OPS,
    SUBMODULES,
    TOKENS,
    AddingLayer,
    FusedLayer,
    GemmaLayer,
    Layer,
    Model,
    ParallelLayer,
    Spliced,
    norm_of,
    table_of,
)

IDS = torch.arange(TOKENS)


@pytest.mark.parametrize("layer", [FusedLayer, GemmaLayer, AddingLayer, ParallelLayer])
def test_an_idle_splice_changes_no_value(layer):
    model = Model(layer)
    with torch.no_grad():
        expected = model(IDS)
    spliced = Spliced(model)
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-6)
    assert not spliced.calls(contracts.anchor)
    assert spliced_calls(spliced.graph)


def test_every_fused_boundary_is_one_op_and_mid_leaves_its_add_to_the_next():
    spliced = Spliced(Model(FusedLayer))
    spliced(IDS)
    ops = spliced.calls(contracts.boundary_)
    assert len(ops) == spliced.report.num_boundary_ops == 2 * LAYERS + 1
    assert spliced.report.num_inline_ops == 0
    assert not spliced.report.missing
    assert {row.form for row in spliced.report.rows} == {"fused"}
    assert [node.args[8] for node in ops] == [False, True, False, True, False]
    assert [node.args[7] is not None for node in ops] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert not spliced.calls(OPS.add_norm.default)


def test_no_add_is_deferred_when_the_plan_says_so():
    spliced = Spliced(Model(FusedLayer), defer_adds=False)
    spliced(IDS)
    assert not any(node.args[8] for node in spliced.calls(contracts.boundary_))


def test_a_boundary_whose_neighbour_is_not_wanted_does_its_own_add():
    model = Model(FusedLayer, wanted=("residual.mid",))
    with torch.no_grad():
        expected = model(IDS)
    spliced = Spliced(model)
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-6)
    assert len(spliced.calls(contracts.boundary_)) == LAYERS
    assert not any(node.args[8] for node in spliced.calls(contracts.boundary_))


@pytest.mark.parametrize("layer", [FusedLayer, AddingLayer])
@pytest.mark.parametrize("submodule", SUBMODULES)
def test_a_program_acts_where_its_site_says(layer, submodule):
    model = Model(layer)
    spliced = Spliced(model)
    plain = spliced(IDS)
    table, stage = Site(0, submodule).table
    model.programs[table].copy_(table_of(stage, 1.5))
    model.occupy([0, 1, 1, 0, 0], table)
    changed = spliced(IDS)
    moved = (changed - plain).abs().amax(dim=-1) > 1e-4
    assert moved.tolist() == [False, True, True, False, False]


def test_a_spliced_graph_and_a_foreign_one_are_left_alone():
    spliced = Spliced(Model(FusedLayer))
    spliced(IDS)
    before = str(spliced.graph)
    assert spliced.splice(spliced.graph) is None
    assert str(spliced.graph) == before
    foreign = torch.fx.symbolic_trace(nn.Linear(2, 2)).graph
    assert spliced.splice(foreign) is None
    assert not spliced_calls(foreign)


def test_rows_that_are_not_the_batchs_tokens_are_refused():
    spliced = Spliced(Model(FusedLayer, half=True))
    spliced(IDS)
    assert not spliced.calls(contracts.boundary_)
    reasons = {row.reason for row in spliced.report.missing}
    assert len(spliced.report.missing) == len(spliced.report.rows)
    assert any("are not the batch's tokens" in reason for reason in reasons)


def test_the_one_that_gemma_adds_to_its_weights_moves_into_the_op():
    spliced = Spliced(Model(GemmaLayer))
    spliced(IDS)
    assert {node.args[3] for node in spliced.calls(contracts.boundary_)} == {1.0}
    assert not spliced.calls(operator.add)


def test_a_stream_that_is_read_again_is_copied():
    model = Model(FusedLayer, again=True)
    with torch.no_grad():
        expected = model(IDS)
    spliced = Spliced(model)
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer", [FusedLayer, AddingLayer])
def test_a_stream_that_is_an_input_is_not_written_to(layer):
    model = Model(layer)
    embeds = torch.randn(TOKENS, HIDDEN)
    before = embeds.clone()
    spliced = Spliced(model)
    plain = spliced(None, inputs_embeds=embeds)
    table, stage = Site(0, "residual.pre").table
    model.programs[table].copy_(table_of(stage, 9.0))
    model.occupy([1] * TOKENS, table)
    assert (spliced(None, inputs_embeds=embeds) - plain).abs().max() > 1e-3
    assert torch.equal(embeds, before)


def test_a_scaled_branch_is_the_blocks_output_before_the_scale():
    spliced = Spliced(Model(AddingLayer))
    spliced(IDS)
    rows = {row.site: row for row in spliced.report.rows}
    assert {row.form for row in spliced.report.rows} == {"inline"}
    scaled = next(n for n in spliced.graph.nodes if n.target is operator.mul)
    assert rows[Site(0, "mlp.post")].node == scaled.args[1].name or (
        rows[Site(0, "mlp.post")].node == scaled.args[0].name
    )


def test_parallel_blocks_say_what_they_lack():
    spliced = Spliced(Model(ParallelLayer))
    spliced(IDS)
    missing = {row.site.submodule for row in spliced.report.missing}
    assert missing == {"residual.mid", "mlp.pre"}
    assert all("in parallel" in row.reason for row in spliced.report.missing)
    assert Site(0, "attention.post").table[1] == Stage.BRANCH


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_are_armed_where_a_rank_holds_them_all(ranks):
    model = Model(FusedLayer, wanted=("attention.heads",))
    spliced = Spliced(model, tensor_parallel_size=ranks)
    spliced(IDS)
    assert len(spliced.calls(contracts.inline_)) == (LAYERS if ranks == 1 else 0)
    reasons = [row.reason for row in spliced.report.missing]
    assert all("its own heads" in reason for reason in reasons)
    assert len(reasons) == (0 if ranks == 1 else LAYERS)


class PostNormLayer(Layer):
    """Norms after the add: the stream is what the norm makes of it."""

    def forward(self, x, residual):
        x = self.ln1(x + self.attn(x))
        return self.ln2(x + self.mlp(x)), None


class LateAddLayer(Layer):
    """Adds the MLP of the layer before in its own first norm, as Nemotron does."""

    def forward(self, x, residual):
        stream = x if residual is None else x + residual
        mid = stream + self.attn(self.ln1(stream))
        return self.mlp(self.ln2(mid)), mid


class LateAddModel(Model):
    def forward(self, input_ids, inputs_embeds=None):
        x, residual = self.embed(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x + residual)


def test_norms_after_the_add_are_refused_with_the_reason():
    spliced = Spliced(Model(PostNormLayer))
    spliced(IDS)
    assert not spliced.calls(contracts.inline_)
    reasons = {row.reason for row in spliced.report.missing}
    assert len(spliced.report.missing) == len(spliced.report.rows)
    assert all("no add to the residual stream ends layer" in r for r in reasons)


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_an_add_that_comes_late_belongs_to_the_layer_before(submodule):
    model = LateAddModel(LateAddLayer)
    spliced = Spliced(model)
    plain = spliced(IDS)
    assert not spliced.report.missing
    table, stage = Site(0, submodule).table
    model.programs[table].copy_(table_of(stage, 1.0))
    model.occupy([0, 1, 1, 0, 0], table)
    edit = {1: model.bank[1], 2: model.bank[1]}

    def by_hand():
        x, residual = model.embed(IDS), None
        for number, layer in enumerate(model.layers):

            def at(name, value, number=number):
                if number == 0 and name == submodule:
                    value = value.clone()
                    for token, vector in edit.items():
                        value[token] += vector
                return value

            if residual is not None:
                x = x + residual
            if number == 1 and submodule == "residual.post":
                for token, vector in edit.items():
                    x[token] += vector
            stream = at("residual.pre", x)
            attention = layer.attn(at("attention.pre", layer.ln1(stream)))
            residual = at("residual.mid", stream + at("attention.post", attention))
            x = at("mlp.post", layer.mlp(at("mlp.pre", layer.ln2(residual))))
        return model.norm(x + residual)

    with torch.no_grad():
        expected = by_hand()
    torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-5)
    assert (expected - plain).abs().max() > 1e-3


BOUNDARIES = (
    Site(0, "residual.pre"),
    Site(0, "residual.mid"),
    Site(1, "residual.pre"),
    Site(1, "residual.mid"),
    Site(1, "residual.post"),
)
SUBSETS = [
    *((number,) for number in range(5)),
    *((1, 2), (2, 3), (3, 4), (0, 1, 3), (0, 2, 3, 4)),
]


def _only(chosen) -> Model:
    """The fused model, armed at the boundaries with these numbers and nowhere else."""
    model = Model(FusedLayer, wanted=())
    wanted = frozenset(BOUNDARIES[number] for number in chosen)
    model.lay_tables(dataclasses.replace(model.plan, wanted=wanted))
    return model


def _norms(graph):
    """Targets and arguments of the graph's own norms, by the norm's place."""
    nodes = [
        n for n in graph.nodes if n.target in (OPS.norm.default, OPS.add_norm.default)
    ]
    return [(n.target, [str(a) for a in n.args[2:]], len(n.users)) for n in nodes]


@pytest.mark.parametrize("chosen", SUBSETS, ids=str)
def test_boundaries_that_nobody_asks_for_stay_as_they_are(chosen):
    model = _only(chosen)
    vanilla = Spliced(model, layers_path="none")
    with torch.no_grad():
        expected = vanilla(IDS)
    before = _norms(vanilla.graph)
    spliced = Spliced(model)
    assert torch.equal(spliced(IDS), expected)
    kept = [norm for number, norm in enumerate(before) if number not in chosen]
    assert len(before) == 5 and _norms(spliced.graph) == kept
    ops = spliced.calls(contracts.boundary_)
    assert len(ops) == len(chosen) and not spliced.report.missing
    # An add waits for the next boundary of its piece, mid[L] for pre[L + 1], only where
    # both are ours.
    deferred = [n in (1, 3) and n + 1 in chosen for n in chosen]
    assert [node.args[8] for node in ops] == deferred
    taken = [n in (2, 4) and n - 1 in chosen for n in chosen]
    assert [node.args[7] is not None for node in ops] == taken


@pytest.mark.parametrize("number", range(5))
def test_a_program_at_the_only_boundary_acts_there_as_by_hand(number):
    model = _only((number,))
    (table,) = model.programs
    spliced = Spliced(model)
    model.occupy([0, 1, 1, 0, 0], table)
    for stage in Stage:
        if number == 0 and stage == Stage.BRANCH:
            continue
        model.programs[table].copy_(table_of(stage, 1.5))
        with torch.no_grad():
            expected = _by_hand(model, number, stage)
        torch.testing.assert_close(spliced(IDS), expected, rtol=0, atol=1e-6)


def _by_hand(model, number, stage):
    """The model in plain PyTorch, with the vector added at one stage of one boundary."""
    place = iter(range(5))

    def norm(module, branch, stream):
        here = next(place) == number

        def at(value, of):
            value = value.clone()
            value[1:3] += 1.5 * model.bank[1] * (here and stage == of)
            return value

        if branch is not None:
            stream = stream + at(branch, Stage.BRANCH)
        stream = at(stream, Stage.STREAM)
        return at(norm_of(stream, module.weight, 1e-5), Stage.NORMED), stream

    branch, stream = None, model.embed(IDS)
    for layer in model.layers:
        y, stream = norm(layer.ln1, branch, stream)
        y, stream = norm(layer.ln2, layer.attn(y), stream)
        branch = layer.mlp(y)
    return norm(model.norm, branch, stream)[0]
