"""vLLM's default on a CPU: Inductor compiles the whole graph, and the splice with it."""

from collections.abc import Iterator

import pytest
import torch

from tests import oracle as judge
from tests.engine import (
    Ask,
    Engine,
    asking,
    assert_judged,
    assert_same,
    distance,
    engine,
    prompt,
    write,
)

pytestmark = pytest.mark.engine

DEFAULT: dict[str, object] = {}
FLAG = {"inductor_passes": {"post_grad_custom_post_pass": "eyesplice.splice_pass"}}
PLACES = ("residual.post", "mlp.pre")
ASKS = [Ask(prompt(6), asking(write("v0", [1], place, scale=1.5))) for place in PLACES]


@pytest.fixture(scope="module")
def inductor(models, vectors) -> Iterator[Engine]:
    config = {"vectors": str(vectors.folder)}
    with engine(models["llama"], config, compilation_config=DEFAULT) as running:
        yield running


def _assert_steers(running: Engine, vectors, oracle: judge.Oracle) -> None:
    plain, *answers = running.ask(Ask(prompt(6)), *ASKS)
    for place, answer in zip(PLACES, answers, strict=True):
        edit = judge.Intervention(place, 1, judge.add(vectors["v0"], 1.5))
        assert_judged(oracle, answer, edit, label=place)
        assert distance(answer, plain) > 1e-2


def test_idle_it_answers_as_vllm(inductor: Engine, vanilla: Engine):
    asks = [Ask(prompt(5 + n, n), max_tokens=12) for n in range(4)]
    for mine, theirs in zip(inductor.ask(*asks), vanilla.ask(*asks), strict=True):
        assert_same(mine, theirs)


def test_it_steers(inductor: Engine, vectors, llama_oracle: judge.Oracle):
    _assert_steers(inductor, vectors, llama_oracle)
    assert (inductor.report.num_boundary_ops, len(inductor.report.missing)) == (9, 0)


def test_a_second_start_steers(
    inductor: Engine, models, vectors, llama_oracle: judge.Oracle
):
    torch.compiler.reset()
    config = {"vectors": str(vectors.folder)}
    with engine(models["llama"], config, compilation_config=DEFAULT) as again:
        _assert_steers(again, vectors, llama_oracle)


def test_the_pass_flag_checks_what_inductor_made_of_it(
    models, vectors, llama_oracle: judge.Oracle, monkeypatch
):
    from eyesplice.integration import verify_lowering as module

    survivors: list[int] = []
    original = module.verify_lowering

    def verify(graph: torch.fx.Graph) -> None:
        survivors.append(original(graph))

    monkeypatch.setattr(module, "verify_lowering", verify)
    # A vector bank of another size: nothing that was compiled before can be reused.
    config = {"vectors": str(vectors.folder), "bank_rows": 99}
    with engine(models["llama"], config, compilation_config=FLAG) as running:
        _assert_steers(running, vectors, llama_oracle)
    assert survivors == [9]
