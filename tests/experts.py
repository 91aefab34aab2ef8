"""The independent judge of routers: edits of the logits of transformers' MoE gates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

Logits = Callable[[Tensor], Tensor]
"""fp32 `[tokens, experts]` to logits of the same shape."""


@contextmanager
def routed(
    layers: Sequence[nn.Module], edits: Mapping[int, Logits]
) -> Iterator[dict[int, Tensor]]:
    """Edit the router's logits at layers; gives what they were at each before the edit.

    Works on gates that return (logits, weights, experts) with weights that sum to 1.
    """
    seen: dict[int, Tensor] = {}

    def hook_of(layer: int) -> Any:
        def hook(gate: Any, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
            seen[layer] = output[0].float().clone()
            logits = edits[layer](seen[layer])
            top, chosen = logits.softmax(dim=-1).topk(gate.top_k, dim=-1)
            weights = top / top.sum(dim=-1, keepdim=True)
            return logits, weights.to(output[1].dtype), chosen

        return hook

    with ExitStack() as stack:
        for layer in edits:
            gate = layers[layer].get_submodule("mlp.gate")
            stack.callback(gate.register_forward_hook(hook_of(layer)).remove)
        yield seen


def steered(
    activate: Sequence[int], deactivate: Sequence[int], epsilon: float = 0.01
) -> Logits:
    """SteerMoE: s = log softmax(z); s_e = max s + eps, then s_e = min s - eps."""

    def edit(z: Tensor) -> Tensor:
        s = z.log_softmax(dim=-1)
        high = s.max(dim=-1).values + epsilon
        low = s.min(dim=-1).values - epsilon
        for expert in activate:
            s[:, expert] = high
        for expert in deactivate:
            s[:, expert] = low
        return s

    return edit
