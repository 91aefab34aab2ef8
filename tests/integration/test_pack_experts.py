"""The pack of experts, fitted and deployed as an app, does what its formula does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from eyesplice.integration.apps import steermoe
from tests.engine import Ask, assert_judged, distance, engine, prompt
from tests.oracle import Oracle

pytestmark = pytest.mark.engine

PROMPT: Final = prompt(11, 700)
SETS: Final = [[prompt(8, seed + i) for i in range(6)] for seed in (400, 500)]
NUM_EXPERTS, TOP_K = 4, 2


@contextmanager
def _gates(oracle: Oracle, hooks: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """These hooks on the gates of the layers."""
    with ExitStack() as stack:
        for layer, hook in hooks.items():
            gate = oracle.layers[layer].get_submodule("mlp.gate")
            stack.callback(gate.register_forward_hook(hook).remove)
        yield


def _picked(oracle: Oracle, prompts: Sequence[Sequence[int]]) -> Tensor:
    """`[tokens, layers, top_k]`: the experts that the prompts' tokens go to."""
    found: list[list[Tensor]] = [[] for _ in oracle.layers]

    def keep(into: list[Tensor]) -> Callable[..., None]:
        return lambda gate, args, output: into.append(output[2])

    with _gates(oracle, {n: keep(into) for n, into in enumerate(found)}):
        for ids in prompts:
            oracle.logprobs(ids, len(ids))
    return torch.stack([torch.cat(into) for into in found], dim=1)


def _steered(up: Sequence[int], down: Sequence[int]) -> Callable[..., Any]:
    """Log-softmax scores, above the highest and below the lowest by 0.01."""

    def hook(gate: nn.Module, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        s = output[0] - output[0].logsumexp(dim=-1, keepdim=True)
        high, low = (part(dim=-1, keepdim=True) for part in (s.amax, s.amin))
        s[:, list(up)], s[:, list(down)] = high + 0.01, low - 0.01
        weights, chosen = s.softmax(dim=-1).topk(output[2].shape[1], dim=-1)
        return output[0], weights / weights.sum(dim=-1, keepdim=True), chosen

    return hook


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
def test_steermoe_moves_tokens_to_other_experts(models: Any, tmp_path: Path, arch: str):
    oracle = Oracle(models[arch])
    risk = steermoe.fit(*(_picked(oracle, group) for group in SETS), NUM_EXPERTS)
    chosen = steermoe.choose(risk, activate=3, deactivate=3, top_k=TOP_K)
    up, down = chosen
    app = steermoe.app(*chosen)
    app.save(tmp_path)
    layers = sorted({*up, *down})
    # Among more than two of four experts a router would choose between equals.
    assert all(len(experts) <= NUM_EXPERTS - TOP_K for experts in down.values())
    router = {"read": "router", "name": "picked", "layers": layers}
    with engine(models[arch], {"apps": str(tmp_path)}) as running:
        specs: tuple[object, ...] = (None, app.name, {"reads": [router]})
        plain, answer, reading = running.ask(*(Ask(PROMPT, spec) for spec in specs))

    edits = {n: _steered(up.get(n, []), down.get(n, [])) for n in layers}
    with _gates(oracle, edits):
        assert_judged(oracle, answer, label=arch)
    assert_judged(oracle, plain, label=f"{arch}: plain")
    assert distance(answer, plain) > 1e-3
    (write,) = answer.eyesplice["writes"]
    assert (write["layers"], write["submodule"]) == (layers, "router.logits")
    ids = [*reading.prompt, *reading.tokens][:-1]
    parts = reading.eyesplice["experts"]["picked"]
    assert [part["layer"] for part in parts] == layers
    assert all(part["positions"] == [*range(len(ids))] for part in parts)
    experts = torch.stack([torch.tensor(part["experts"]) for part in parts], dim=1)
    assert experts.equal(_picked(oracle, [ids])[:, layers])
