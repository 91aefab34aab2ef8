"""The oracle against independent algebra, on every architecture."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import oracle, tiny_models
from tests.oracle import SUBMODULES, Intervention, Oracle, where

PROMPT = [7, 301, 44, 44, 509, 130, 88, 3]
PROMPT_LEN = len(PROMPT)
TOKENS = [*PROMPT, 19, 402, 250, 11]
NUM_LAYERS = tiny_models.NUM_LAYERS
HIDDEN = tiny_models.HIDDEN_SIZE

Judge = tuple[str, Oracle, dict[str, Tensor]]


@pytest.fixture(scope="module", params=tiny_models.NAMES)
def judge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Judge:
    """A model's name, its oracle and its weights as they are on disk."""
    name: str = request.param
    folder = tiny_models.make(name, tmp_path_factory.mktemp(name))
    return name, Oracle(folder), load_file(folder / "model.safetensors")


def vector(seed: int) -> Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5 of the largest value: fp32 sums of about a hundred terms."""
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


def norm_by_hand(name: str, h: Tensor, weights: dict[str, Tensor], key: str) -> Tensor:
    weight = weights[f"{key}.weight"]
    if name in ("gpt2", "opt"):
        centred = h - h.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weight + weights[f"{key}.bias"]
    gemma = name.startswith("gemma")
    eps = 1e-5 if name == "mixtral" else 1e-6
    scaled = h / (h.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return scaled * (1 + weight if gemma else weight)


def logits_by_hand(
    name: str, h: Tensor, weights: dict[str, Tensor], o: Oracle
) -> Tensor:
    """The final norm and the head, from the weights on disk."""
    heads = [k for k in weights if k.endswith("lm_head.weight")] or [
        k for k in weights if k.endswith(("embed_tokens.weight", "wte.weight"))
    ]
    normed = norm_by_hand(name, h, weights, o.anatomy.final_norm)
    logits = normed @ weights[heads[0]].T
    return 30 * (logits / 30).tanh() if name == "gemma2" else logits


def trace(
    o: Oracle, edits: list[Intervention], tokens: list[int] = TOKENS
) -> tuple[dict[tuple[str, int], tuple[Tensor, Tensor]], Tensor]:
    """Every value before and after its edits, and the log-probabilities."""
    before: dict[tuple[str, int], list[Tensor]] = {}
    after: dict[tuple[str, int], list[Tensor]] = {}
    sites = [(s, layer) for s in SUBMODULES for layer in range(NUM_LAYERS)]
    first = [
        Intervention(*site, oracle.record(before.setdefault(site, [])))
        for site in sites
    ]
    last = [
        Intervention(*site, oracle.record(after.setdefault(site, []))) for site in sites
    ]
    logprobs = o.logprobs(tokens, PROMPT_LEN, [*first, *edits, *last])
    values = {}
    for site in sites:
        assert len(before[site]) == len(after[site]) == 1, site
        values[site] = before[site][0], after[site][0]
    return values, logprobs


def edits_everywhere() -> list[Intervention]:
    return [
        Intervention(submodule, layer, oracle.add(vector(10 * layer + i), 0.5))
        for i, submodule in enumerate(SUBMODULES)
        for layer in range(NUM_LAYERS)
    ]


@pytest.mark.parametrize("edited", [False, True], ids=["plain", "edited_everywhere"])
def test_the_values_obey_the_block_equations(judge: Judge, edited: bool) -> None:
    name, o, weights = judge
    values, logprobs = trace(o, edits_everywhere() if edited else [])

    def before(submodule: str, layer: int) -> Tensor:
        return values[submodule, layer][0]

    def after(submodule: str, layer: int) -> Tensor:
        return values[submodule, layer][1]

    for layer in range(NUM_LAYERS):
        prefix = f"{o.anatomy.layers}.{layer}."
        stream, mid = after("residual.pre", layer), after("residual.mid", layer)
        close(
            before("attention.pre", layer),
            norm_by_hand(name, stream, weights, prefix + o.anatomy.attention_pre),
        )
        close(before("residual.mid", layer), stream + after("attention.post", layer))
        # The norm sees the edited stream, and so does the sum after the MLP.
        close(
            before("mlp.pre", layer),
            norm_by_hand(name, mid, weights, prefix + o.anatomy.mlp_pre),
        )
        close(before("residual.post", layer), mid + after("mlp.post", layer))
        if layer + 1 < NUM_LAYERS:
            left = after("residual.post", layer)
            assert torch.equal(before("residual.pre", layer + 1), left)
    logits = logits_by_hand(name, after("residual.post", -1 % NUM_LAYERS), weights, o)
    close(logprobs, logits.log_softmax(-1))


def test_an_edit_is_exactly_its_function(judge: Judge) -> None:
    _, o, _ = judge
    values, _ = trace(o, edits_everywhere())
    for i, submodule in enumerate(SUBMODULES):
        for layer in range(NUM_LAYERS):
            before, after = values[submodule, layer]
            assert torch.equal(after, before + 0.5 * vector(10 * layer + i))


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_an_edit_changes_what_follows_and_nothing_before(
    judge: Judge, submodule: str
) -> None:
    name, o, _ = judge
    plain, plain_logprobs = trace(o, [])
    edit = where(oracle.add(vector(1)), oracle.positions(5, 6))
    edited, logprobs = trace(o, [Intervention(submodule, 2, edit)])
    if name in ("mixtral", "qwen3_moe"):
        # The last bits of a row depend on how many tokens go to each expert.
        close(logprobs[:5], plain_logprobs[:5])
    else:
        assert torch.equal(logprobs[:5], plain_logprobs[:5])
    assert (logprobs[5:] - plain_logprobs[5:]).abs().amax(-1).min() > 1e-4
    order = [(s, layer) for layer in range(NUM_LAYERS) for s in SUBMODULES]
    place = order.index((submodule, 2))
    for index, site in enumerate(order):
        same = torch.equal(plain[site][0], edited[site][0])
        assert same == (index <= place), site


def test_a_normed_input_feeds_its_branch_only(judge: Judge) -> None:
    _, o, _ = judge
    plain, _ = trace(o, [])
    for normed, branch, total in (
        ("attention.pre", "attention.post", "residual.mid"),
        ("mlp.pre", "mlp.post", "residual.post"),
    ):
        edited, _ = trace(o, [Intervention(normed, 1, oracle.add(vector(2)))])
        moved = edited[branch, 1][0] - plain[branch, 1][0]
        assert moved.abs().max() > 1e-2
        close(edited[total, 1][0], plain[total, 1][0] + moved)


def zero(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
    return torch.zeros_like(h)


def test_without_branches_the_embedding_reaches_the_head(judge: Judge) -> None:
    name, o, weights = judge
    silent = [
        Intervention(submodule, layer, zero)
        for submodule in ("attention.post", "mlp.post")
        for layer in range(NUM_LAYERS)
    ]
    prefix = "model.decoder." if name == "opt" else "model."
    ids = torch.tensor(TOKENS)
    positions = torch.arange(len(TOKENS))
    if name == "gpt2":
        h = weights["transformer.wte.weight"][ids]
        h = h + weights["transformer.wpe.weight"][positions]
    else:
        h = weights[prefix + "embed_tokens.weight"][ids]
    if name == "opt":
        h = h + weights[prefix + "embed_positions.weight"][positions + 2]
    if name.startswith("gemma"):
        h = h * HIDDEN**0.5
    expected = logits_by_hand(name, h, weights, o).log_softmax(-1)
    close(o.logprobs(TOKENS, PROMPT_LEN, silent), expected)


def test_the_same_place_by_two_names(judge: Judge) -> None:
    _, o, _ = judge
    push = oracle.add(vector(3), 2.0)
    for one, other in (
        (("residual.post", 1), ("residual.pre", 2)),
        (("attention.post", 1), ("residual.mid", 1)),
        (("mlp.post", 1), ("residual.post", 1)),
        (("residual.post", 3), ("residual.post", -1)),
    ):
        expected = o.logprobs(TOKENS, PROMPT_LEN, [Intervention(*one, push)])
        close(o.logprobs(TOKENS, PROMPT_LEN, [Intervention(*other, push)]), expected)


def test_interventions_compose_in_order(judge: Judge) -> None:
    _, o, _ = judge
    v = vector(4)
    push, cut = oracle.add(v, 2.0), oracle.ablate(v)
    for first, second in (
        (("residual.post", 0), ("residual.pre", 1)),
        (("residual.mid", 1), ("residual.mid", 1)),
    ):
        pair = [Intervention(*first, push), Intervention(*second, cut)]
        lone = [Intervention(*second, cut)]
        close(
            o.logprobs(TOKENS, PROMPT_LEN, pair), o.logprobs(TOKENS, PROMPT_LEN, lone)
        )


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_ablation_leaves_no_component(judge: Judge, submodule: str) -> None:
    _, o, _ = judge
    v = vector(5)
    values, _ = trace(o, [Intervention(submodule, 1, oracle.ablate(v))])
    before, after = values[submodule, 1]
    assert (before @ v).abs().max() > 1
    assert (after @ v).abs().max() < 1e-3
    # Where the value goes next, the component is gone as well.
    follower = {
        "residual.post": ("residual.pre", 2),
        "residual.pre": ("residual.pre", 1),
    }
    if submodule in follower:
        assert (values[follower[submodule]][1] @ v).abs().max() < 1e-3
    if submodule == "residual.mid":
        left = values["residual.post", 1][0] - values["mlp.post", 1][1]
        assert (left @ v).abs().max() < 1e-3


def test_generation_follows_the_conditioned_edits(judge: Judge) -> None:
    _, o, _ = judge
    edit = where(oracle.add(vector(6), 4.0), oracle.generated)
    push = [Intervention("residual.post", 2, edit)]
    plain, steered = o.generate(PROMPT, 6), o.generate(PROMPT, 6, push)
    assert len(plain) == len(steered) == 6
    assert plain[0] == steered[0]
    assert plain != steered
    assert len(set(plain)) > 2
    logprobs = o.logprobs([*PROMPT, *steered], PROMPT_LEN, push)
    assert logprobs[PROMPT_LEN - 1 : -1].argmax(-1).tolist() == steered
    unsteered = o.logprobs(PROMPT, PROMPT_LEN)
    close(logprobs[:PROMPT_LEN], unsteered)


def test_hooks_leave_nothing_behind(judge: Judge) -> None:
    _, o, _ = judge
    plain = o.logprobs(TOKENS, PROMPT_LEN)
    o.logprobs(TOKENS, PROMPT_LEN, edits_everywhere())
    with pytest.raises(ValueError, match="not one of"):
        o.logprobs(TOKENS, PROMPT_LEN, [Intervention("residual", 0, zero)])
    with pytest.raises(IndexError):
        o.logprobs(TOKENS, PROMPT_LEN, [Intervention("mlp.pre", NUM_LAYERS, zero)])
    assert torch.equal(o.logprobs(TOKENS, PROMPT_LEN), plain)
    probabilities = plain.exp()
    close(probabilities.sum(-1), torch.ones(len(TOKENS)))
    # Neither flat nor degenerate: a slip in the arithmetic has to show.
    entropy = -(probabilities * plain).sum(-1)
    assert 0.05 < entropy.mean() < 5.5


def llama_by_hand(weights: dict[str, Tensor], edits: dict[str, Tensor]) -> Tensor:
    """A Llama forward pass with nothing from transformers; `edits` at layer 1."""
    num_tokens = len(TOKENS)
    frequency = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angle = torch.outer(torch.arange(num_tokens, dtype=torch.float64), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :16], x[..., 16:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def edit(submodule: str, layer: int, value: Tensor) -> Tensor:
        return value + edits[submodule] if layer == 1 and submodule in edits else value

    w = {key: value.double() for key, value in weights.items()}
    h = w["model.embed_tokens.weight"][torch.tensor(TOKENS)]
    for layer in range(NUM_LAYERS):
        p = f"model.layers.{layer}."
        h = edit("residual.pre", layer, h)
        x = edit(
            "attention.pre", layer, norm_by_hand("llama", h, w, p + "input_layernorm")
        )
        q, k, v = (
            (x @ w[f"{p}self_attn.{n}_proj.weight"].T).view(num_tokens, -1, 32)
            for n in "qkv"
        )
        heads = []
        for head in range(4):
            scores = rotate(q[:, head]) @ rotate(k[:, head // 2]).T / 32**0.5
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            heads.append(scores.softmax(-1) @ v[:, head // 2])
        attention = torch.cat(heads, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
        h = edit("residual.mid", layer, h + edit("attention.post", layer, attention))
        y = norm_by_hand("llama", h, w, p + "post_attention_layernorm")
        y = edit("mlp.pre", layer, y)
        gate, up, down = (w[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        gated = y @ gate.T
        mlp = (gated * gated.sigmoid() * (y @ up.T)) @ down.T
        h = edit("residual.post", layer, h + edit("mlp.post", layer, mlp))
    h = norm_by_hand("llama", h, w, "model.norm")
    logits = h @ w["lm_head.weight"].T
    return logits.log_softmax(-1).float()


@pytest.mark.parametrize("submodule", [None, *SUBMODULES])
def test_llama_by_hand(tmp_path: Path, submodule: str | None) -> None:
    folder = tiny_models.make("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    v = vector(7)
    interventions = [Intervention(submodule, 1, oracle.add(v))] if submodule else []
    actual = Oracle(folder).logprobs(TOKENS, PROMPT_LEN, interventions)
    close(actual, llama_by_hand(weights, {submodule: v} if submodule else {}))


H = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(8))
AT = torch.arange(6)


def projection(h: Tensor, v: Tensor) -> Tensor:
    unit: Tensor = v / v.norm()
    return h @ unit


def test_clamp_moves_the_projection_into_the_interval() -> None:
    v = 3 * vector(9)
    edited = oracle.clamp(v, -0.5, 0.25)(H, AT, 3)
    close(projection(edited, v), projection(H, v).clamp(-0.5, 0.25))
    close(oracle.ablate(v)(edited, AT, 3), oracle.ablate(v)(H, AT, 3))


def test_one_sided_removes_only_what_exceeds_the_offset() -> None:
    v = 3 * vector(9)
    p = projection(H, v)
    edited = oracle.one_sided(v, 0.2, 1.0)(H, AT, 3)
    close(projection(edited, v), torch.minimum(p, torch.tensor(0.2)))
    both = oracle.one_sided(-v, 0.0, 0.5)(
        oracle.one_sided(v, 0.0, 0.5)(H, AT, 3), AT, 3
    )
    close(both, oracle.ablate(v, 0.5)(H, AT, 3))


@pytest.mark.parametrize(
    ("mask", "chosen"),
    [
        (oracle.all_tokens, [0, 1, 2, 3, 4, 5]),
        (oracle.prompt, [0, 1, 2]),
        (oracle.generated, [3, 4, 5]),
        (oracle.last_token, [2]),
        (oracle.positions(1, 4), [1, 2, 3]),
        (oracle.positions(-2, 5), [1, 2, 3, 4]),
        (oracle.positions(-3, -1), [0, 1]),
        (oracle.positions(4, 100), [4, 5]),
    ],
)
def test_masks(mask: Callable[[Tensor, int], Tensor], chosen: list[int]) -> None:
    edited = where(zero, mask)(H, AT, 3)
    assert (edited == 0).all(-1).nonzero().flatten().tolist() == chosen
    kept = [i for i in range(6) if i not in chosen]
    assert torch.equal(edited[kept], H[kept])


def test_models_are_reproducible(tmp_path: Path) -> None:
    one, same, other = (
        load_file(
            tiny_models.make("opt", tmp_path / n, seed=seed) / "model.safetensors"
        )
        for n, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)
    half = tiny_models.make("opt", tmp_path / "d", seed=1, dtype=torch.bfloat16)
    stored = load_file(half / "model.safetensors")
    assert all(torch.equal(stored[key], one[key].bfloat16()) for key in one)
