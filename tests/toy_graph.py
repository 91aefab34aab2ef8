"""Small models whose Dynamo graphs have the forms that the pass looks for."""

import dataclasses

import torch
from torch import nn

from eyesplice.fx_passes.custom_sites import NO_CUSTOM_SITES
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import Entry, pack
from eyesplice.fx_passes.sites import Site
from eyesplice.fx_passes.splice_pass import SplicePass
from eyesplice.ops import contracts
from eyesplice.ops.layout import Opcode, Stage
from eyesplice.ops.site_tables import SiteTables, open_tables
from eyesplice.ops.work import empty_work

HIDDEN, LAYERS, TOKENS = 16, 2, 5
SUBMODULES = (
    "residual.pre",
    "attention.pre",
    "attention.post",
    "residual.mid",
    "mlp.pre",
    "mlp.post",
    "residual.post",
)
_toy = torch.library.Library("toy", "DEF")
_toy.define("attention(Tensor q, Tensor(a!) output) -> ()")
_toy.define("norm(Tensor x, Tensor? weight, float epsilon, int? v=None) -> Tensor")
_toy.define(
    "add_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, "
    "int? variance_size=None) -> (Tensor, Tensor)"
)


def norm_of(x, weight, epsilon, v=None):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y * weight).to(x.dtype)


def _add_norm(x, x_residual, weight, epsilon, variance_size=None):
    h = x + x_residual
    return norm_of(h, weight, epsilon), h


def _attention(q, output):
    output.copy_(q * 2)


_toy.impl("attention", _attention, "CPU")
_toy.impl("norm", norm_of, "CPU")
_toy.impl("add_norm", _add_norm, "CPU")
_toy._register_fake("attention", lambda q, output: None)
_toy._register_fake("norm", norm_of)
_toy._register_fake("add_norm", _add_norm)
OPS = torch.ops.toy


class Norm(nn.Module):
    offset = 0.0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def scale(self):
        return self.weight.float() + self.offset if self.offset else self.weight

    def forward(self, x, residual=None):
        if residual is None:
            return OPS.norm.default(x, self.scale(), 1e-5)
        return OPS.add_norm.default(x, residual, self.scale(), 1e-5)


class GemmaNorm(Norm):
    offset = 1.0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        out = torch.empty_like(x)
        OPS.attention.default(x, out)
        return self.o_proj(out)


class Layer(nn.Module):
    norm = Norm

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = self.norm(), self.norm()
        self.attn, self.mlp = Attention(), nn.Linear(HIDDEN, HIDDEN, bias=False)


class FusedLayer(Layer):
    def forward(self, x, residual):
        if residual is None:
            residual, x = x, self.ln1(x)
        else:
            x, residual = self.ln1(x, residual)
        x, residual = self.ln2(self.attn(x), residual)
        return self.mlp(x), residual


class GemmaLayer(FusedLayer):
    norm = GemmaNorm


class AddingLayer(Layer):
    def forward(self, x, residual):
        x = x + self.attn(self.ln1(x))
        return x + 0.5 * self.mlp(self.ln2(x)), None


class ParallelLayer(Layer):
    def forward(self, x, residual):
        normed = self.ln1(x)
        return x + (self.attn(normed) + self.mlp(normed)), None


class Model(nn.Module):
    """Embedding, layers, final norm; the tables hang on the layers, as in an engine."""

    def __init__(
        self, layer, *, wanted=SUBMODULES, half=False, again=False, custom=None
    ):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm = layer.norm()
        self.half, self.again = half, again
        self.plan = SplicePlan(
            layers_path="layers",
            num_layers=LAYERS,
            wanted=frozenset(Site(i, s) for i in range(LAYERS) for s in wanted),
            attention_ops=frozenset({"toy::attention"}),
            fused_norm_op="toy::add_norm",
            norm_op="toy::norm",
            custom=custom or NO_CUSTOM_SITES,
        )
        self.select = torch.full((64,), -1, dtype=torch.int32)
        self.bank = torch.randn(3, HIDDEN)
        self.weights = [torch.randn(c.rows, HIDDEN) for c in self.plan.custom]
        self.work = empty_work(64, 2, 2, 4, HIDDEN, torch.float32, "cpu")
        self.lay_tables(self.plan)
        for module in self.layers:
            module.register_forward_pre_hook(_anchor)

    def lay_tables(self, plan):
        """Hang the tables of a plan on the layers, with nothing in them."""
        self.plan, tables, empty = plan, plan.tables(), table_of()
        self.programs = {table: empty.clone() for table in tables}
        self.token_map = torch.zeros(len(tables), 64, dtype=torch.int32)
        self.maps = dict(zip(tables, self.token_map, strict=True))
        beside = (self.select, self.bank, list(self.work))
        open_tables(
            self,
            (
                (self.programs[table], SiteTables(self.maps[table], *beside))
                for table in tables
            ),
        )
        for number, module in enumerate(self.layers):
            own = plan.tables_of_layer(number)
            module.number = number
            module.tables = [self.programs[table] for table in own]
            module.weights = [
                self.weights[c.number] for c in plan.custom_of_layer(number)
            ]

    def occupy(self, active, *tables):
        """Give the active tokens work at these tables, and the others at all others."""
        active = torch.as_tensor(active, dtype=torch.int32)
        self.token_map[:, : len(active)] = 1 - active
        for table in tables:
            self.maps[table][: len(active)] = active

    def forward(self, input_ids, inputs_embeds=None):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if self.half:
            x = x[: x.shape[0] // 2]
        residual = None
        for layer in self.layers:
            before = residual
            x, residual = layer(x, residual)
        if residual is None:
            return self.norm(x)
        y, _ = self.norm(x, residual)
        return y + before if self.again else y


def table_of(stage=Stage.BRANCH, gain=0.0):
    """A table whose row 1 adds `gain` times bank row 1 at every token."""
    add = Entry(stage=stage, opcode=Opcode.ADD, u=1, clause_mask=1, gain=gain)
    return torch.stack([pack((), 4), pack((add,) if gain else (), 4)])


def _anchor(module, args):
    tensors = [*module.tables, *module.weights]
    contracts.anchor(tensors, module.number)


class Spliced:
    """A model compiled with a backend that splices, its graph and its report."""

    def __init__(self, model, **changes):
        self.model = model
        self.splice = SplicePass(dataclasses.replace(model.plan, **changes))
        torch._dynamo.reset()
        self.run = torch.compile(model.forward, backend=self._backend, fullgraph=True)

    def _backend(self, module, inputs):
        self.report = self.splice(module.graph)
        module.recompile()
        self.graph = module.graph
        return module.forward

    def __call__(self, *args, **kwargs):
        for value in (*args, *kwargs.values()):
            if value is not None:
                torch._dynamo.mark_dynamic(value, 0)
        with torch.no_grad():
            return self.run(*args, **kwargs)

    def calls(self, op):
        return [node for node in self.graph.nodes if node.target is op]
