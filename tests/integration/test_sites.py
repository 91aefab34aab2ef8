"""Every site of every architecture: a write there does what the oracle's hook does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests import oracle as judge
from tests.engine import (
    Answer,
    Ask,
    Engine,
    asking,
    assert_judged,
    distance,
    engine,
    prompt,
    write,
)
from tests.oracle import Intervention, Oracle
from tests.tiny_models import NAMES, NUM_LAYERS

pytestmark = pytest.mark.engine

PROMPT: Final = prompt(11)
ADD_LAYERS: Final = [0, 2, 3]
ABLATE_LAYERS: Final = [1, 3]
DEFAULT: Final = 7 * NUM_LAYERS

Hooks = Callable[[Oracle], AbstractContextManager[None]]


@dataclass(frozen=True)
class Case:
    """A request, and the same thing said to the oracle."""

    spec: dict[str, object]
    interventions: Sequence[Intervention] = ()
    hooks: Hooks = field(default=lambda _: nullcontext())


@dataclass(frozen=True)
class Expected:
    """What the pass makes of an architecture with `sites="all"`.

    Attributes:
        boundaries: fused ops.
        inline: inline ops.
        inline_sites: submodules that are armed inline, the others being fused.
    """

    boundaries: int
    inline: int
    inline_sites: frozenset[str]


def _fused(*more: str) -> Expected:
    # Two boundaries a layer, and the one at the final norm.
    inline = {"attention.heads", *more}
    return Expected(2 * NUM_LAYERS + 1, NUM_LAYERS * len(inline), frozenset(inline))


_EVERY: Final = frozenset((*judge.SUBMODULES, "attention.heads"))
# residual.pre of a layer is residual.post of the one before: one op for both.
_INLINE: Final = Expected(0, NUM_LAYERS * 7 + 1, _EVERY)

EXPECTED: Final[dict[str, Expected]] = {
    "llama": _fused(),
    "qwen2": _fused(),
    "qwen3": _fused(),
    "mixtral": _fused("router.logits"),
    "qwen3_moe": _fused("router.logits"),
    "gemma2": _fused(),
    "gemma3": _fused(),
    "gpt2": _INLINE,
    "opt": _INLINE,
}


def _add(submodule: str, vectors: Any) -> Case:
    spec = asking(write("layered", ADD_LAYERS, submodule, scale=1.5))
    edits = [(layer, judge.add(vectors["layered"][layer], 1.5)) for layer in ADD_LAYERS]
    return Case(spec, [Intervention(submodule, layer, fn) for layer, fn in edits])


def _ablate(submodule: str, vectors: Any) -> Case:
    spec = asking(write("v1", ABLATE_LAYERS, submodule, write="ablate"))
    edit = judge.ablate(vectors["v1"])
    return Case(spec, [Intervention(submodule, layer, edit) for layer in ABLATE_LAYERS])


def _heads(vectors: Any) -> Case:
    spec = asking(write("layered", ADD_LAYERS, "attention.heads", scale=1.5))

    @contextmanager
    def hooks(oracle: Oracle) -> Iterator[None]:
        def hook(row: Tensor) -> Callable[..., tuple[Tensor]]:
            return lambda module, args: (args[0] + 1.5 * row,)

        with ExitStack() as stack:
            for layer in ADD_LAYERS:
                projection = _output_projection(oracle.layers[layer])
                fn = hook(vectors["layered"][layer])
                stack.callback(projection.register_forward_pre_hook(fn).remove)
            yield

    return Case(spec, hooks=hooks)


def _output_projection(layer: nn.Module) -> nn.Module:
    names = ("self_attn.o_proj", "self_attn.out_proj", "attn.c_proj")
    modules = dict(layer.named_modules())
    return next(modules[name] for name in names if name in modules)


def _router(vectors: Any) -> Case:
    spec = asking(write("experts", [0, 3], "router.logits", scale=1.0))

    def hook(gate: Any, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits = output[0] + vectors["experts"]
        top, chosen = logits.softmax(dim=-1).topk(gate.top_k, dim=-1)
        return logits, top / top.sum(dim=-1, keepdim=True), chosen

    @contextmanager
    def hooks(oracle: Oracle) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in (0, 3):
                gate = oracle.layers[layer].get_submodule("mlp.gate")
                stack.callback(gate.register_forward_hook(hook).remove)
            yield

    return Case(spec, hooks=hooks)


def _kernels(vectors: Any) -> dict[str, Case]:
    """The other two kernels."""
    v = vectors["v2"]
    edits = {
        "clamp": ({"lo": -0.5, "hi": 0.25}, judge.clamp(v, -0.5, 0.25)),
        "one_sided": ({"offset": -0.3}, judge.one_sided(v, -0.3)),
    }
    return {
        f"{kernel} {place}": Case(
            asking(write("v2", ABLATE_LAYERS, place, write=kernel, **arguments)),
            [Intervention(place, layer, edit) for layer in ABLATE_LAYERS],
        )
        for kernel, (arguments, edit) in edits.items()
        for place in ("residual.post", "mlp.post")
    }


def _cases(arch: str, vectors: Any) -> dict[str, Case]:
    cases = {f"add {place}": _add(place, vectors) for place in judge.SUBMODULES}
    for place in ("residual.post", "attention.post", "mlp.post"):
        cases[f"ablate {place}"] = _ablate(place, vectors)
    cases["add attention.heads"] = _heads(vectors)
    if arch in ("mixtral", "qwen3_moe"):
        cases["add router.logits"] = _router(vectors)
    if arch == "llama":
        cases |= _kernels(vectors)
    return cases


@dataclass(frozen=True)
class World:
    """One architecture: what its engine reported and answered."""

    arch: str
    report: Any
    plain: Answer
    cases: dict[str, Case]
    answers: dict[str, Answer]
    oracle: Oracle


@pytest.fixture(scope="module", params=NAMES)
def world(request, models, vectors) -> World:
    arch = request.param
    cases = _cases(arch, vectors)
    config = {"vectors": str(vectors.folder), "sites": "all"}
    with engine(models[arch], config) as running:
        asks = [Ask(PROMPT, case.spec) for case in cases.values()]
        plain, *answers = running.ask(Ask(PROMPT), *asks)
        report = running.report
    named = dict(zip(cases, answers, strict=True))
    return World(arch, report, plain, cases, named, Oracle(models[arch]))


def test_every_write_does_what_the_oracles_hook_does(world: World):
    assert_judged(world.oracle, world.plain, label="plain")
    for name, case in world.cases.items():
        answer, label = world.answers[name], f"{world.arch}: {name}"
        with case.hooks(world.oracle):
            assert_judged(world.oracle, answer, *case.interventions, label=label)
        assert distance(answer, world.plain) > 1e-2, label


def test_the_pass_arms_every_site_in_the_expected_form(world: World):
    report, expected = world.report, EXPECTED[world.arch]
    assert not report.missing
    experts = "router.logits" in expected.inline_sites
    assert len(report.rows) == DEFAULT + NUM_LAYERS * (1 + experts)
    assert (report.num_boundary_ops, report.num_inline_ops) == (
        expected.boundaries,
        expected.inline,
    )
    for row in report.rows:
        inline = row.site.submodule in expected.inline_sites
        assert row.form == ("inline" if inline else "fused"), row
        assert row.node and row.shape.startswith("[s"), row


def test_the_default_sites_of_a_fused_decoder_need_nine_ops(llama: Engine):
    report = llama.report
    assert not report.missing and len(report.rows) == DEFAULT
    assert (report.num_boundary_ops, report.num_inline_ops) == (9, 0)
    assert {row.form for row in report.rows} == {"fused"}


def test_a_layered_vector_is_not_the_same_at_each_layer(vectors):
    rows = vectors["layered"]
    assert torch.stack([*rows]).unique(dim=0).shape == rows.shape
