"""Routers that run inside the experts' op, armed by a hook on their module.

vLLM's `moe_forward` is one node of the graph. Where it also runs the router (Qwen3-MoE,
DeepSeek), it calls the router's module as Python, eagerly or while a CUDA graph is
captured: a hook there calls `inline_` on the logits, and the capture keeps the call. The
hook runs on the stream of the op's caller, between the boundary before the experts and
the one after; shared experts on a stream of their own touch nothing that it does.

On CPU the experts' code is traced into the graph, and the pass finds the logits there.
"""

from typing import Any, Final

import torch
from torch import nn

from eyesplice.fx_passes.plan import HiddenRouter, SplicePlan
from eyesplice.fx_passes.sites import Table
from eyesplice.integration import ledger
from eyesplice.integration.buffers import Buffers
from eyesplice.integration.table_op import TableOp, first_tensor
from eyesplice.ops.layout import Stage

_NAMES: Final = ("gate", "router")
"""What vLLM's models call the module that gives router logits."""


def find_hidden_routers(
    root: nn.Module, layers_path: str, *, sequence_parallel: bool
) -> tuple[HiddenRouter, ...]:
    """Every router that an opaque op runs, with the reason if it cannot be hooked.

    Args:
        root: the compiled module.
        layers_path: path of its decoder layers.
        sequence_parallel: whether a rank's experts see a part of the batch's tokens.
    """
    found = []
    for number in range(len(list(root.get_submodule(layers_path).children()))):
        layer = f"{layers_path}.{number}"
        for path, runner in _runners_with_gates(root, layer):
            if _is_opaque(runner):
                reason = _refuse(runner, sequence_parallel)
                found.append(HiddenRouter(number, path, reason))
    return tuple(found)


def router_modules(model: nn.Module, layer: str) -> dict[str, str | None]:
    """The paths of modules that may give a layer's router logits.

    Args:
        model: the model.
        layer: path of the decoder layer.

    Returns:
        By path: why the module cannot be hooked, None if it can.
    """
    found = {
        path: _refuse(runner, sequence_parallel=False)
        for path, runner in _runners_with_gates(model, layer)
    }
    for name, _ in model.get_submodule(layer).named_modules():
        if name.rpartition(".")[2] in _NAMES:
            found.setdefault(f"{layer}.{name}", None)
    return found


def _runners_with_gates(model: nn.Module, layer: str) -> list[tuple[str, Any]]:
    """The runners of a layer that call a gate themselves, each with the gate's path."""
    block = model.get_submodule(layer)
    return [
        (f"{layer}.{_path_of_gate(block, name, module)}", module)
        for name, module in block.named_modules()
        if isinstance(module, ledger.MOE_RUNNER.get())
        and getattr(module, "gate", None) is not None
    ]


def hook_routers(root: nn.Module, plan: SplicePlan, buffers: Buffers) -> None:
    """Hook the routers whose logits are wanted."""
    for router in plan.hidden_routers:
        table = Table("router", router.layer)
        if router.reason is None and table in buffers.index:
            op = TableOp(buffers, table, plan.families)
            root.get_submodule(router.module).register_forward_hook(_hook(op))


def _hook(op: TableOp) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        # A traced router is in the graph, where the pass arms it.
        if not torch.compiler.is_compiling():
            op.inline(first_tensor(output), Stage.BRANCH)

    return hook


def _is_opaque(runner: Any) -> bool:
    """Whether the runner's code is behind an op, rather than traced."""
    entry = getattr(runner, "_forward_entry", None)
    return isinstance(entry, torch._ops.OpOverloadPacket | torch._ops.OpOverload)


def _path_of_gate(layer: nn.Module, runner_path: str, runner: Any) -> str:
    """The gate's path in its layer: the block's own name for it is the shortest."""
    paths = (
        path
        for path, module in layer.named_modules(remove_duplicate=False)
        if module is runner.gate
    )
    return min(paths, key=len, default=f"{runner_path}.gate")


def _refuse(runner: Any, sequence_parallel: bool) -> str | None:
    if getattr(runner, "_fse_fuse_gate", False):
        return (
            "the router runs inside the experts' op, in one product with the shared "
            "expert's gate: no module gives its logits"
        )
    if sequence_parallel or runner.moe_config.is_sequence_parallel:
        return (
            "the router runs inside the experts' op on a rank's part of the tokens "
            "(sequence parallelism), not on the batch's"
        )
    return None
