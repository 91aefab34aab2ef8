"""The packs: what each fits and states, against the papers' formulas in plain torch."""

import pytest
import torch
from safetensors.torch import save_file

import eyesplice as m
from eyesplice.fx_passes.context import DeployedApp, TokenSet
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_request
from eyesplice.integration.apps import (
    PACKS,
    arditi,
    cast,
    kts,
    orgad,
    sake,
    seal,
    steermoe,
    template,
)
from tests import request_world
from tests.request_world import HIDDEN, NUM_EXPERTS

W = 12


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rows(*shape, shift=0.0):
    return torch.randn(*shape) * 2 + shift


def by_name(app):
    return {entry["name"]: entry for entry in app.functions}


def edit_of(rank=2):
    v = torch.randn(HIDDEN)
    u = torch.randn(rank, HIDDEN)
    return sake.Edit(v, 2.5, u, u + 1, torch.randn(rank), v * 2)


# Layers that a model of four has; the templates name those of the papers' models.
SMALL = {
    "arditi": lambda: arditi.app(torch.ones(HIDDEN)),
    "addition": lambda: arditi.addition(torch.ones(HIDDEN), 2, -1.0),
    "cast": lambda: cast.app(torch.ones(HIDDEN), torch.ones(HIDDEN), [0, 1], [2], -0.5),
    "cast last": lambda: cast.app(
        torch.ones(4, HIDDEN),
        torch.ones(4, HIDDEN),
        [1],
        "2-3",
        1e-7,
        comparison="<",
        pool="last",
    ),
    "kts": lambda: kts.app(
        torch.ones(4, HIDDEN), torch.ones(HIDDEN), 0.5, [-2, -1], probe_layer=0
    ),
    "orgad": lambda: orgad.app(torch.ones(HIDDEN), 0.5, 2),
    "sake": lambda: sake.app([edit_of(2), edit_of(3)]),
    "seal": lambda: seal.app(torch.ones(HIDDEN), 2),
    "steermoe": lambda: steermoe.app({1: [1, 4]}, {1: [6]}),
}


def lowered(app):
    """The app's program in a small model in which it is deployed."""
    tensors = {f"{app.name}/{name}": t for name, t in app.tensors.items()}
    mask = torch.zeros(NUM_EXPERTS)
    mask[[1, 4]], mask[6] = 1, -1
    context = request_world.context(
        table=request_world.Vectors({**tensors, "mask": mask}),
        apps={app.name: DeployedApp(app.name, app.functions)},
        token_sets={f"{app.name}/{s}": TokenSet(1, "sha256:") for s in app.token_sets},
    )
    request = parse_request({"eyesplice": app.name}, context)
    return lower(request, context)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_serves_it(name):
    app = SMALL[name]()
    program = lowered(app)
    assert len(program.functions) == len(app.functions)
    assert m.App.from_dict(app.to_dict()) == app


def filled(pack):
    """What each template's `tensors.safetensors` must hold."""
    v, other = torch.randn(2, W)
    u, down = torch.randn(2, 2, W)
    found = {
        "arditi": {"direction": v},
        "cast": {"condition": v, "behaviour": other},
        "kts": {"weight": v, "vector": other},
        "orgad": {"weight": v},
        "sake": {
            "edit0.centre": v,
            "edit0.u": u,
            "edit0.v": down,
            "edit0.bias": v[:2],
            "edit0.offset": other,
        },
        "seal": {"vector": v},
        "steermoe": {},
    }
    return {name: tensor.clone() for name, tensor in found[pack].items()}


SAME = {
    "arditi": lambda t: arditi.app(**t),
    "cast": lambda t: cast.app(
        **t, condition_layers=[7], behaviour_layers="15-23", threshold=0.05
    ),
    "kts": lambda t: kts.app(**t, bias=0.0, layers="11-30"),
    "orgad": lambda t: orgad.app(**t, bias=0.0, layer=15),
    "sake": lambda t: sake.app(
        [sake.Edit(threshold=6.5, **{k.removeprefix("edit0."): t[k] for k in t})]
    ),
    "seal": lambda t: seal.app(**t, layer=20),
    "steermoe": lambda t: steermoe.app({3: [0, 5], 7: [2]}, {3: [1]}),
}


@pytest.mark.parametrize("pack", PACKS)
def test_a_template_is_the_app_of_its_module(pack, tmp_path):
    tensors = filled(pack)
    (tmp_path / "app.yaml").write_text(template(pack))
    if tensors:
        with pytest.raises(m.SpecError, match="cannot be read"):
            m.load_app(tmp_path)
        save_file(tensors, tmp_path / "tensors.safetensors")
    loaded = m.load_app(tmp_path)
    assert loaded == SAME[pack](tensors)
    loaded.save(tmp_path / "again")
    assert m.load_app(tmp_path / "again") == loaded


def test_an_unknown_pack_is_refused():
    with pytest.raises(m.SpecError, match="arditi"):
        template("../arditi")


def test_arditi_direction_and_sites():
    harmful, harmless = rows(9, W, shift=3.0), rows(7, W)
    direction = arditi.fit(harmful, harmless)
    expected = harmful.double().sum(0) / 9 - harmless.double().sum(0) / 7
    torch.testing.assert_close(direction, expected.float())
    entries = arditi.app(direction).functions
    assert [(e["write"], e["layers"], e["submodule"]) for e in entries] == [
        ("ablate", "all", "residual.pre"),
        ("ablate", "all", "attention.post"),
        ("ablate", "all", "mlp.post"),
    ]
    (add,) = arditi.addition(direction, 3, -1.0).functions
    assert (add["layers"], add["submodule"]) == ([3], "residual.pre")
    assert add["scale"] == -1.0


def test_what_arditi_writes_leaves_nothing_along_the_direction():
    """The paper's W_out' = W_out - r r^T W_out on every writer, told by activations."""
    direction = torch.randn(W).double()
    unit = direction / direction.norm()

    def ablate(h):
        return h - (h @ direction)[:, None] * direction / direction.square().sum()

    stream = torch.randn(5, W).double()
    edited, weights = ablate(stream), [torch.randn(W, W).double() for _ in range(6)]
    by_weights = stream - torch.outer(stream @ unit, unit)
    for weight in weights:
        edited = edited + ablate(torch.tanh(edited @ weight))
        orthogonal = torch.eye(W).double() - torch.outer(unit, unit)
        by_weights = by_weights + torch.tanh(by_weights @ weight) @ orthogonal
    torch.testing.assert_close(edited, by_weights)
    assert (edited @ unit).abs().max() < 1e-12


def test_seal_vector_and_trigger():
    execution, reflection, transition = rows(8, W, shift=1), rows(5, W), rows(3, W)
    vector = seal.fit(execution, reflection, transition)
    other = (reflection.sum(0) + transition.sum(0)) / 8
    torch.testing.assert_close(vector, execution.mean(0) - other)
    app = seal.app(vector, 20, 0.5)
    (steer,) = app.functions
    assert app.token_sets == {"blank_line": {"decoded_endswith": "\n\n"}}
    assert steer["when"] == "generated and token_in(blank_line)"
    assert (steer["layers"], steer["scale"]) == ([20], 0.5)
    listed = seal.app(vector, 20, 0.5, token_ids=range(271, 197, -73))
    assert listed.token_sets == {"blank_line": [198, 271]}
    assert listed.functions == app.functions
    for none in ([], [-1], [1.5]):
        with pytest.raises(m.SpecError, match="blank_line"):
            seal.app(vector, 20, token_ids=none)


def test_cast_vector_is_the_first_component_of_the_centred_pairs():
    direction = torch.nn.functional.normalize(torch.randn(W), dim=0)
    negative = rows(40, W)
    positive = negative + torch.randn(40, W) * 0.1 + 2 * direction
    found = cast.fit(positive, negative).double()

    middle = (positive + negative) / 2
    centred = torch.cat([positive - middle, negative - middle]).double()
    covariance = centred.T @ centred / len(centred)
    values, vectors = torch.linalg.eigh(covariance)
    torch.testing.assert_close((found @ vectors[:, -1]).abs(), torch.ones(()).double())
    torch.testing.assert_close(found @ covariance @ found, values[-1])
    assert found @ direction.double() > 0.9
    torch.testing.assert_close(cast.fit(negative, positive).double(), -found)


def test_cast_condition_and_behaviour():
    v = torch.ones(W)
    found = by_name(cast.app(v, v, [3, 5], [9], -0.25, scale=2.0))
    assert found["condition1"]["layers"] == [5]
    assert found["condition0"]["over"] == "prompt"
    behaviour = found["behaviour"]
    assert behaviour["gate"] == "condition0.mean > -0.25 or condition1.mean > -0.25"
    assert behaviour["submodule"] == "residual.pre"
    last = by_name(cast.app(v, v, [3], [9], 1e-7, comparison="<", pool="last"))
    assert last["condition0"]["when"] == "last_token"
    assert last["behaviour"]["gate"] == "condition0.last < 1e-07"
    for wrong in ({"pool": "max"}, {"comparison": ">="}):
        with pytest.raises(m.SpecError):
            cast.app(v, v, [3], [9], 0.0, **wrong)


def newton(positive, negative, c):
    """Logistic regression by Newton's method on (w, b), fp64, as scikit-learn's loss."""
    x = torch.cat([positive, negative]).double()
    y = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))]).double()
    x = torch.cat([x, torch.ones(len(x), 1).double()], dim=1)
    penalty = torch.diag(torch.tensor([1.0] * (x.shape[1] - 1) + [0.0]).double())

    def loss(w):
        margins = (2 * y - 1) * (x @ w)
        return w @ penalty @ w / 2 - c * torch.nn.functional.logsigmoid(margins).sum()

    found = torch.zeros(x.shape[1]).double()
    for _ in range(100):
        p = torch.sigmoid(x @ found)
        gradient = penalty @ found + c * x.T @ (p - y)
        hessian = penalty + c * (x.T * (p * (1 - p))) @ x
        step = torch.linalg.solve(hessian, gradient)
        while step.norm() > 1e-12 and loss(found - step) > loss(found) + 1e-12:
            step = step / 2
        found = found - step
    assert step.norm() < 1e-6
    return found[:-1], found[-1]


@pytest.mark.parametrize("c", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("shift", [0.2, 3.0])
def test_the_probe_is_the_minimum_of_logistic_regression(c, shift):
    correct, wrong = rows(30, W, shift=shift), rows(20, W)
    probe = orgad.fit(correct, wrong, c)
    weight, bias = newton(correct, wrong, c)
    torch.testing.assert_close(probe.weight.double(), weight, rtol=1e-4, atol=1e-5)
    assert probe.bias == pytest.approx(float(bias), rel=1e-4, abs=1e-4)
    same = kts.fit_probe(correct, wrong, c)
    assert torch.equal(same.weight, probe.weight)


def test_a_probe_of_activations_far_from_zero():
    correct, wrong = rows(30, W, shift=101.0), rows(30, W, shift=100.0)
    probe = orgad.fit(correct, wrong)
    weight, bias = newton(correct, wrong, 1.0)
    torch.testing.assert_close(probe.weight.double(), weight, rtol=1e-3, atol=1e-5)
    assert probe.bias == pytest.approx(float(bias), rel=1e-3)


def test_orgad_reads_and_changes_nothing():
    (entry,) = orgad.app(torch.ones(W), 0.25, 14).functions
    assert entry["read"] == "probe"
    assert (entry["function"], entry["bias"]) == ("sigmoid", 0.25)
    assert (entry["submodule"], entry["when"]) == ("mlp.post", "all")


def transport(source, target, reg):
    """A and b of POT's LinearTransport, with full matrices, row samples, fp64."""

    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T

    source, target = source.double(), target.double()
    means = source.mean(0), target.mean(0)
    ridge = reg * torch.eye(source.shape[1]).double()
    c_s, c_t = (
        (x - mean).T @ (x - mean) / len(x) + ridge
        for x, mean in zip((source, target), means, strict=True)
    )
    half = root(c_s)
    inverse = torch.linalg.inv(half)
    a = inverse @ root(half @ c_t @ half) @ inverse
    return a, means[1] - a @ means[0]


def edited(h, edit):
    """The two writes in order, by the language's formulas."""
    h = h + (h @ edit.v.T.double() + edit.bias.double()) @ edit.u.double()
    return h + edit.offset.double()


@pytest.mark.parametrize(("n", "k"), [(5, 4), (40, 30), (3, 40), (1, 5)])
@pytest.mark.parametrize("reg", [1e-2, 0.5])
def test_sake_is_the_linear_transport_map(n, k, reg):
    source, target = rows(n, W, shift=1.0), rows(k, W, shift=-2.0)
    edit = sake.fit(source, target, reg=reg)
    a, b = transport(source, target, reg)
    h = torch.randn(20, W).double() * 5
    torch.testing.assert_close(edited(h, edit), h @ a.T + b, rtol=1e-4, atol=1e-4)
    assert len(edit.u) <= min(W, n + k - 2)


def test_sake_moves_the_source_onto_the_target():
    source, target = rows(500, W, shift=1.0) * 0.5, rows(400, W, shift=-2.0)
    edit = sake.fit(source, target, reg=1e-6)
    moved = edited(source.double(), edit)
    torch.testing.assert_close(
        moved.mean(0), target.double().mean(0), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        moved.T.cov(correction=0),
        target.double().T.cov(correction=0),
        rtol=1e-3,
        atol=1e-3,
    )


def test_sake_keeps_the_directions_that_matter_most():
    source, target = rows(30, W), rows(30, W, shift=1.0) * torch.linspace(0.2, 4, W)
    a, _ = transport(source, target, 1e-2)
    errors = []
    for rank in (1, 4, 8, None):
        edit = sake.fit(source, target, rank=rank)
        error = a - torch.eye(W) - edit.u.double().T @ edit.v.double()
        errors.append(float(torch.linalg.matrix_norm(error, 2)))
    excess = (torch.linalg.eigvalsh(a) - 1).abs().sort(descending=True).values
    assert errors[:3] == pytest.approx(excess[[1, 4, 8]].tolist(), rel=1e-3)
    assert errors[3] < 1e-4


def test_sake_scope_and_order():
    edit = sake.fit(rows(6, W, shift=1.0), rows(6, W))
    app = sake.app([edit, sake.fit(rows(4, W), rows(5, W), threshold=6.5)])
    assert [e["name"] for e in app.functions] == [
        "edit0_scope",
        "edit1_scope",
        "edit0_turn",
        "edit0_shift",
        "edit1_turn",
        "edit1_shift",
    ]
    assert {e["when"] for e in app.functions} == {"last_token"}
    assert {str(e["layers"]) for e in app.functions} == {"[-1]"}
    assert app.functions[4]["gate"] == "edit1_scope <= 6.5"
    assert app.functions[2]["gate"] == f"edit0_scope <= {edit.threshold}"
    torch.manual_seed(0)
    source = rows(6, W, shift=1.0)
    farthest = (source - source.mean(0)).norm(dim=1).max()
    assert edit.threshold == pytest.approx(float(farthest), rel=1e-5)


def test_kts_vector_probe_and_gate():
    wanted, unwanted = rows(6, 3, W), rows(5, 3, W)
    vector = kts.fit(wanted, unwanted)
    torch.testing.assert_close(vector, wanted.mean(0) - unwanted.mean(0))
    found = by_name(kts.app(vector, torch.ones(W), -0.5, [1, 2], probe_layer=0))
    assert found["unsafe"]["when"] == "last_token"
    assert found["unsafe"]["bias"] == -0.5
    assert found["steer"]["gate"] == "latch(unsafe >= 0)"
    assert found["steer"]["scale"] == 1.5


def test_steermoe_risk_difference():
    experts, top_k = 6, 2
    picks = [
        torch.stack(
            [
                torch.stack([torch.randperm(experts)[:top_k] for _ in range(3)])
                for _ in range(tokens)
            ]
        )
        for tokens in (50, 30)
    ]
    risk = steermoe.fit(picks[0], picks[1], experts)
    for layer in range(3):
        for expert in range(experts):
            shares = [
                sum(expert in token[layer].tolist() for token in pick) / len(pick)
                for pick in picks
            ]
            assert float(risk[layer, expert]) == pytest.approx(shares[0] - shares[1])


def test_steermoe_chooses_the_largest_differences():
    risk = torch.tensor([[0.9, 0.8, 0.7, -0.1], [0.2, -0.6, -0.5, 0.0]])
    chosen = steermoe.choose(risk, activate=3, deactivate=2, top_k=2, layers=[4, 9])
    assert chosen.activate == {4: [0, 1], 9: [0]}
    assert chosen.deactivate == {9: [1, 2]}
    everything = steermoe.choose(risk, activate=99, deactivate=99, top_k=1)
    assert everything.activate == {0: [0], 1: [0]}
    assert everything.deactivate == {0: [3], 1: [1, 2]}
    # A token that goes to three of four experts can be kept from one.
    assert steermoe.choose(risk, 99, 99, top_k=3).deactivate == {0: [3], 1: [1]}
    assert steermoe.choose(risk, 99, 99, top_k=4) == ({0: [0, 1, 2], 1: [0]}, {})
    nothing = steermoe.choose(risk, activate=0, deactivate=1, top_k=2)
    assert nothing == ({}, {1: [1]})
    (entry,) = steermoe.app(*chosen).functions
    assert entry["activate"] == {"4": [0, 1], "9": [0]}
    assert "layers" not in entry


WRONG = {
    "axes": lambda: arditi.fit(torch.ones(W), torch.ones(3, W)),
    "nan": lambda: arditi.fit(torch.full((2, W), float("nan")), torch.ones(3, W)),
    "none": lambda: arditi.fit(torch.ones(0, W), torch.ones(3, W)),
    "widths": lambda: arditi.fit(torch.ones(2, W), torch.ones(3, W + 1)),
    "layers": lambda: kts.fit(torch.ones(2, 3, W), torch.ones(3, W)),
    "seal": lambda: seal.fit(torch.ones(2, W), torch.ones(2, W), torch.ones(2, W + 1)),
    "pairs": lambda: cast.fit(torch.ones(2, W), torch.ones(3, W)),
    "probe": lambda: orgad.fit(torch.ones(2, W), torch.ones(3, W + 1)),
    "map": lambda: sake.fit(torch.ones(2, W), torch.ones(3, W + 1)),
    "reg": lambda: sake.fit(torch.ones(2, W), torch.ones(3, W), reg=0.0),
    "rank": lambda: sake.fit(torch.ones(2, W), torch.ones(3, W), rank=0),
    "no edits": lambda: sake.app([]),
    "experts": lambda: steermoe.fit(torch.ones(2, 1, 1).long(), torch.ones(1), 2),
    "expert": lambda: steermoe.fit(*[torch.full((2, 1, 1), 2)] * 2, 2),
    "floats": lambda: steermoe.fit(*[torch.ones(2, 1, 1)] * 2, 2),
    "moe layers": lambda: steermoe.fit(
        torch.zeros(2, 1, 1).long(), torch.zeros(2, 2, 1).long(), 2
    ),
    "no experts": lambda: steermoe.app({}, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_fitted_is_refused(name):
    with pytest.raises(m.SpecError):
        WRONG[name]()


def test_equal_samples_change_nothing():
    same = torch.ones(3, W)
    edit = sake.fit(same, same)
    h = torch.randn(4, W).double()
    torch.testing.assert_close(edited(h, edit), h)
