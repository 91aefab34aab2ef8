"""Which layers hooks can arm, on toy models: the forms that are known, and the traps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import Entry, pack
from eyesplice.fx_passes.report import SpliceReport
from eyesplice.fx_passes.sites import BOUNDARY_SUBMODULES, Site
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.module_finder import find_layers_without_graph
from eyesplice.integration.module_form import arm_modules
from eyesplice.ops.layout import Opcode

HIDDEN, LAYERS, TOKENS = 16, 2, 5


def _attention_base() -> Any:
    from eyesplice.integration import ledger

    return ledger.ATTENTION_LAYER.get()


class RMSNorm(nn.Module):
    offset = 0.0
    variance_epsilon = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def normed(self, h: Tensor) -> Tensor:
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return h * scale * (self.weight + self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return self.normed(x)
        h = x + residual
        return self.normed(h), h


class CentredNorm(RMSNorm):
    def normed(self, h: Tensor) -> Tensor:
        return super().normed(h - h.mean(-1, keepdim=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        class Attention(nn.Module, _attention_base()):  # type: ignore[misc]
            def get_attn_backend(self) -> Any: ...
            def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

            def forward(self, x: Tensor) -> Tensor:
                return x.cumsum(0) * 0.1

        self.attn, self.o_proj = Attention(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attn(x))


class Layer(nn.Module):
    norm: Callable[[], nn.Module] = RMSNorm

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = type(self).norm(), type(self).norm()
        self.attn, self.mlp = Block(), nn.Linear(HIDDEN, HIDDEN)


class Fused(Layer):
    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual, x = x, self.ln_1(x)
        else:
            x, residual = self.ln_1(x, residual)
        x, residual = self.ln_2(self.attn(x), residual)
        return self.mlp(x), residual


class GemmaRMSNorm(RMSNorm):
    offset = 1.0


class FusedGemma(Fused):
    norm = GemmaRMSNorm


class FusedCentred(Fused):
    norm = CentredNorm


class Adding(Layer):
    norm = staticmethod(lambda: nn.LayerNorm(HIDDEN))  # type: ignore[assignment]

    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x)), None


class Scaled(Adding):
    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        x = x + 0.5 * self.attn(self.ln_1(x))
        return x + 0.5 * self.mlp(self.ln_2(x)), None


class Keeping(Adding):
    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x.clone())), None


class Parallel(Adding):
    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        y = self.ln_1(x)
        return x + self.attn(y) + self.mlp(y), None


class PostNorm(Adding):
    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x)), None


class Batched(Adding):
    def forward(self, x: Tensor, residual: Tensor | None) -> Any:
        x = x[None]
        x = x + self.attn(self.ln_1(x))
        return (x + self.mlp(self.ln_2(x)))[0].clone(), None


class Model(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm = layer.norm()

    def forward(self, ids: Tensor) -> Tensor:
        x, residual = self.embed(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x) if residual is None else self.norm(x, residual)[0]


IDS = torch.arange(TOKENS)
WANTED = frozenset(
    Site(layer, name)
    for layer in range(LAYERS)
    for name in (*BOUNDARY_SUBMODULES, "attention.heads", "router.logits")
)


def _armed(layer: type[Layer]) -> tuple[Model, SpliceReport, Buffers]:
    model = Model(layer).requires_grad_(False)
    root, path = find_layers_without_graph(model, LAYERS)
    plan = SplicePlan(path, LAYERS, WANTED)
    sizes = BufferSizes(tokens=TOKENS, requests=2, entries=4, bank_rows=2, width=HIDDEN)
    cpu = torch.device("cpu")
    buffers = Buffers.allocate(plan, sizes, dtype=torch.float32, device=cpu)
    buffers.bank[1] = torch.linspace(-1, 1, HIDDEN)
    report = arm_modules(
        root,
        plan,
        buffers,
        heads_width=HIDDEN,
        rehearse=lambda: model(IDS),
        idle=lambda: False,
    )
    return model, report, buffers


def _forms(report: SpliceReport) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for row in report.rows:
        found.setdefault(row.site.submodule, set()).add(row.form)
    return found


def _values(model: Model) -> dict[Site, Tensor]:
    """What plain Python gives for an adding or fused model, before any edit."""
    values: dict[Site, Tensor] = {}
    x = model.embed(IDS)
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        values[Site(number, "residual.pre")] = x
        for norm, block, names in (
            (
                layer.ln_1,
                layer.attn,
                ("attention.pre", "attention.post", "residual.mid"),
            ),
            (layer.ln_2, layer.mlp, ("mlp.pre", "mlp.post", "residual.post")),
        ):
            y = norm(x)
            out = block(y)
            x = x + out
            values |= {
                Site(number, name): value
                for name, value in zip(names, (y, out, x), strict=True)
            }  # type: ignore[arg-type]
    return values


@pytest.mark.parametrize("layer", [Fused, FusedGemma, Adding])
def test_known_forms_are_armed_where_their_values_are(layer: type[Layer]):
    expected = _values(Model(layer).requires_grad_(False))
    model, report, buffers = _armed(layer)
    forms = _forms(report)
    assert forms.pop("router.logits") == {None}
    assert all(found == {"module"} for found in forms.values()), forms
    buffers.select[:] = 1
    for site, value in expected.items():
        table, stage = site.table
        read = Entry(opcode=Opcode.READ, stage=stage, clause_mask=1, v=1)
        buffers.program.zero_()
        buffers.program[buffers.index[table], 1] = pack((read,), 4)
        # Only this table's map says that there is anything to do.
        buffers.token_map.zero_()
        buffers.token_map[buffers.index[table]] = 1
        model(IDS)
        dots = value @ buffers.bank[1]
        torch.testing.assert_close(buffers.score[:, 0], dots, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [Fused, FusedGemma, Adding])
def test_nothing_to_do_changes_nothing(layer: type[Layer]):
    plain = Model(layer).requires_grad_(False)(IDS)
    model, _, _ = _armed(layer)
    assert torch.equal(model(IDS), plain)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (FusedCentred, "not an RMSNorm"),
        (Scaled, "does not add its block's output to the stream as it is"),
        (Keeping, "or keeps the stream elsewhere"),
        (Parallel, "not attention and then an MLP"),
        (PostNorm, "does not add its block's output to the stream as it is"),
        (Batched, "not attention and then an MLP"),
    ],
)
def test_other_forms_are_missing_with_a_reason(layer: type[Layer], reason: str):
    plain = Model(layer).requires_grad_(False)(IDS)
    model, report, _ = _armed(layer)
    for row in report.rows:
        if row.site.submodule in BOUNDARY_SUBMODULES:
            assert row.form is None and reason in str(row.reason), row
    assert torch.equal(model(IDS), plain)


def test_a_model_without_such_a_list_of_layers_is_told():
    with pytest.raises(LookupError, match="no list of 3 layers"):
        find_layers_without_graph(Model(Adding), 3)
