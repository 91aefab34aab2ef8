"""An engine that is armed at one boundary: there it steers, elsewhere it is vLLM's own."""

from collections.abc import Iterator
from typing import Any

import pytest

import eyesplice
from eyesplice.integration import session
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
from tests.oracle import Intervention
from tests.tiny_models import NUM_LAYERS

pytestmark = pytest.mark.engine

LAYER = 1
SITES = [{"submodule": "residual.post", "layers": LAYER}]
ASKS = [Ask(prompt(5 + 3 * number, number), max_tokens=16) for number in range(6)]


@pytest.fixture(scope="module")
def running(models, vectors) -> Iterator[Engine]:
    config = {"vectors": str(vectors.folder), "sites": SITES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "_keep_graphs", True)
        with engine(models["llama"], config, enable_prefix_caching=True) as opened:
            yield opened


@pytest.fixture(scope="module")
def graphs(running: Engine) -> Any:
    return running._core.model_executor.driver_worker.worker.eyesplice


def test_every_other_boundary_is_still_vllms(running: Engine, graphs):
    report, norm = running.report, "vllm_ir.fused_add_rms_norm"
    assert {(str(row.site), row.form) for row in report.rows} == {
        (f"residual.post[{LAYER}]", "fused"),
        (f"residual.pre[{LAYER + 1}]", "fused"),
    }
    assert (report.num_boundary_ops, report.num_inline_ops) == (1, 0)
    assert graphs.before.count(norm) == 2 * NUM_LAYERS
    assert graphs.after.count(norm) == 2 * NUM_LAYERS - 1
    assert graphs.after.count("eyesplice.boundary_") == 1
    assert "eyesplice.anchor" not in graphs.after
    assert running.router._buffers.program.shape[0] == 1


def test_idle_it_has_the_bits_of_vllm(running: Engine, vanilla: Engine):
    for mine, theirs in zip(running.ask(*ASKS), vanilla.ask(*ASKS), strict=True):
        assert_same(mine, theirs, 0.0)


def test_a_write_there_is_the_oracles_hook_beside_plain_requests(
    running: Engine, vectors, llama_oracle
):
    value = vectors["v3"]
    cases = {
        "add": (
            asking(write("v3", [LAYER], scale=2.0)),
            Intervention("residual.post", LAYER, judge.add(value, 2.0)),
        ),
        "ablate": (
            asking(write("v3", [LAYER + 1], "residual.pre", write="ablate")),
            Intervention("residual.post", LAYER, judge.ablate(value)),
        ),
    }
    plain = running.ask(ASKS[0])[0]
    for name, (spec, intervention) in cases.items():
        steered = Ask(ASKS[0].prompt, spec, max_tokens=16)
        beside, acted = running.ask(ASKS[0], steered)
        assert_same(beside, plain)
        assert_judged(llama_oracle, acted, intervention, label=name)
        assert distance(acted, plain) > 1e-2, name


def test_a_request_for_another_boundary_is_told_which_there_are(running: Engine):
    with pytest.raises(eyesplice.SpecError, match="armed"):
        running.ask(Ask(prompt(4), asking(write("v0", [LAYER], "residual.mid"))))
