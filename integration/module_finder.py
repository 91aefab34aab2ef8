"""Finds the values of decoder layers among what their modules take and give.

From one recorded batch: which module is called before the layer's attention and which
after, and whose output is whose input. Names and classes decide nothing but what a norm
is. Two forms of layer are known:

    fused    norm(x, stream) -> (y, stream + x)      twice a layer: both boundaries
    adding   stream + attention(norm(stream)), then the same with the MLP

The first is what vLLM's models with RMSNorm do. In the second (GPT-2, OPT) the sum that
follows attention is the very tensor that the next norm takes, so that a write to it in
place reaches the stream. `module_proof` puts all of it to the test.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from eyesplice.fx_passes.sites import Table
from eyesplice.integration import ledger
from eyesplice.integration.hidden_routers import router_modules
from eyesplice.integration.module_places import Norm, Places, Side, Value
from eyesplice.integration.rehearsal import Call, Recording
from eyesplice.ops.layout import Stage

_FORM = (
    "its layers are not attention and then an MLP, each normed and added to the stream"
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The layers of a model that runs without a graph.

    Attributes:
        model: the whole of it.
        layers_path: path of the list of layers.
    """

    model: nn.Module
    layers_path: str

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers by path, in order."""
        children = self.model.get_submodule(self.layers_path).named_children()
        return {f"{self.layers_path}.{name}": layer for name, layer in children}

    def children(self, layer: str) -> dict[str, nn.Module]:
        """A layer's own modules by path."""
        found = self.model.get_submodule(layer).named_children()
        return {f"{layer}.{name}": child for name, child in found}

    def attention(self, layer: str) -> dict[str, nn.Module]:
        """The modules of a layer that mix tokens, by path."""
        base = ledger.ATTENTION_LAYER.get()
        found = self.model.get_submodule(layer).named_modules()
        return {f"{layer}.{n}": m for n, m in found if n and isinstance(m, base)}

    def final_norms(self) -> dict[str, nn.Module]:
        """The norms beside the list of layers, by path."""
        parent = self.layers_path.rpartition(".")[0]
        found = self.model.get_submodule(parent).named_children()
        prefix = f"{parent}." if parent else ""
        return {f"{prefix}{n}": m for n, m in found if is_norm(m)}

    def watched(self) -> dict[str, nn.Module]:
        """Every module whose calls the finder asks for."""
        found = self.layers | self.final_norms()
        for layer in self.layers:
            found |= self.children(layer) | self.attention(layer)
            found |= {
                path: self.model.get_submodule(path)
                for path in router_modules(self.model, layer)
            }
        return found


def is_norm(module: nn.Module) -> bool:
    """Whether a module norms rows, by the name of its class."""
    return "norm" in type(module).__name__.lower()


def find_layers_without_graph(
    model: nn.Module, num_layers: int
) -> tuple[nn.Module, str]:
    """The model, and the path of its list of that many layers, attention in each.

    Raises:
        LookupError: there is none.
    """
    base = ledger.ATTENTION_LAYER.get()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        if all(any(isinstance(m, base) for m in layer.modules()) for layer in module):
            return model, path
    raise LookupError(f"this model has no list of {num_layers} layers with attention")


class Finder:
    """Reads one recording."""

    def __init__(self, decoder: Decoder, recording: Recording) -> None:
        self._decoder = decoder
        self._recording = recording
        self._paths = list(decoder.layers)
        self._stream: Tensor | None = None
        self.places = Places()
        entry = self._entry(0)
        self._shape = None if entry is None else tuple(entry.shape)

    def find(self, heads_width: int, num_experts: int, ranks: int) -> Places:
        """Every value that a hook reaches, and a reason for each other.

        Args:
            heads_width: elements per token of all heads.
            num_experts: experts of a mixture layer, 0 for a dense model.
            ranks: ranks that share a layer.
        """
        self._boundaries()
        for number, layer in enumerate(self._paths):
            self._heads(number, layer, heads_width, ranks)
            self._router(number, layer, num_experts)
        return self.places

    def _boundaries(self) -> None:
        chained = self._chained()
        if chained is not None:
            self._refuse_all(chained)
            return
        fused = any(self._adding_norms(self._decoder.children(p)) for p in self._paths)
        for number, layer in enumerate(self._paths):
            reason = self._fused(number, layer) if fused else self._added(number, layer)
            if reason is not None:
                self._refuse_all(f"layer {number}: {reason}")
                return
        if fused:
            final = self._adding_norms(self._decoder.final_norms())
            if len(final) != 1 or not _same(final[0].inputs[1], self._stream):
                self._refuse_all("no norm after the last layer adds its output")
                return
            self._norm(Table("pre", len(self._paths)), final[0])

    def _refuse_all(self, reason: str) -> None:
        for number in range(len(self._paths) + 1):
            for table in (Table("pre", number), Table("mid", number)):
                self.places.refuse(table, reason)

    def _chained(self) -> str | None:
        """Why the layers do not hand `[tokens, hidden]` on to one another."""
        for number in range(len(self._paths)):
            call = self._recording.only(self._paths[number])
            if call is None or self._shape is None:
                return (
                    "its layers do not take one [tokens, hidden] value each (models that "
                    "run through vLLM's Transformers backend hold [1, tokens, hidden])"
                )
            if number and not _same(self._exit(number - 1), self._entry(number)):
                return f"layer {number} does not take what layer {number - 1} gives"
        return None

    def _entry(self, number: int) -> Tensor | None:
        call = self._recording.only(self._paths[number])
        return call.inputs[0] if call and call.inputs else None

    def _exit(self, number: int) -> Tensor | None:
        call = self._recording.only(self._paths[number])
        return call.outputs[0] if call and call.outputs else None

    def _calls(self, layer: str) -> list[Call]:
        """The calls of a layer's own modules, but for those it shares with others.

        A hook on a shared one (an activation function) would act in every layer.
        """
        children = self._decoder.children(layer)
        calls = (self._recording.only(path) for path in children)
        return sorted((c for c in calls if c is not None), key=lambda c: c.start)

    def _attention(self, layer: str) -> Call | None:
        """The call of the layer's block that holds its attention."""
        inside = self._decoder.attention(layer)
        for call in self._calls(layer):
            if any(p == call.path or p.startswith(f"{call.path}.") for p in inside):
                return call
        return None

    def _is_norm(self, call: Call) -> bool:
        return is_norm(self._decoder.model.get_submodule(call.path))

    def _adding_norms(self, modules: Mapping[str, nn.Module]) -> list[Call]:
        """Calls of norms with a branch and the stream, in order."""
        norms = {path: module for path, module in modules.items() if is_norm(module)}
        calls = [c for path in norms if (c := self._recording.only(path)) is not None]
        return [
            call
            for call in sorted(calls, key=lambda call: call.start)
            if len(call.inputs) == len(call.outputs) == 2
            and {tuple(t.shape) for t in call.inputs} == {self._shape}
        ]

    def _norm(self, table: Table, call: Call) -> None:
        adds, width = len(call.inputs) == 2, call.inputs[0].shape[1]
        self.places.norms[table] = Norm(call.path, 0.0, adds, width)

    def _fused(self, number: int, layer: str) -> str | None:
        attention = self._attention(layer)
        if attention is None:
            return _FORM
        norms = self._adding_norms(self._decoder.children(layer))
        before = [n for n in norms if n.stop < attention.start]
        after = [n for n in norms if n.start > attention.stop]
        entry = self._entry(number)
        if number == 0 and not before:
            before = [
                call
                for call in self._calls(layer)
                if call.stop < attention.start
                and self._is_norm(call)
                and len(call.inputs) == len(call.outputs) == 1
                and _same(call.inputs[0], entry)
            ]
        if len(before) != 1 or len(after) != 1 or len(norms) > 2:
            return _FORM
        first, second = before[0], after[0]
        stream = first.outputs[1] if len(first.outputs) == 2 else entry
        if number and not _same(first.inputs[1], self._stream):
            return "it does not take the stream of the layer before"
        if not _same(second.inputs[1], stream):
            return "the stream does not pass from its first norm to its second"
        self._stream = second.outputs[1]
        readers = [c for c in self._calls(layer) if c.start > second.stop]
        for norm, block in ((first, [attention]), (second, readers[:1])):
            if not block or not _taken(norm.outputs[0], block[0]):
                return f"no block takes what {norm.path} gives"
        self._norm(Table("pre", number), first)
        self._norm(Table("mid", number), second)
        return None

    def _added(self, number: int, layer: str) -> str | None:
        attention, entry = self._attention(layer), self._entry(number)
        if attention is None or not attention.outputs or entry is None:
            return _FORM
        calls = self._calls(layer)
        norms = [c for c in calls if self._is_norm(c) and c.inputs and c.outputs]
        before = [n for n in norms if n.stop < attention.start]
        after = [n for n in norms if n.start > attention.stop]
        if not after:
            return _FORM
        blocks = [c for c in calls if c.start > after[0].stop and not self._is_norm(c)]
        if not blocks or not blocks[-1].outputs:
            return _FORM
        pre, mid, post = (
            Table("pre", number),
            Table("mid", number),
            Table("pre", number + 1),
        )
        if number == 0:
            self._value(pre, Stage.STREAM, layer, "input", entry)
        if (
            before
            and _same(before[-1].inputs[0], entry)
            and _taken(before[-1].outputs[0], attention)
        ):
            self._value(pre, Stage.NORMED, before[-1].path, "output", entry)
        out = attention.outputs[0]
        self._value(mid, Stage.BRANCH, attention.path, "output", out)
        self._value(mid, Stage.STREAM, after[0].path, "input", after[0].inputs[0])
        if _taken(after[0].outputs[0], blocks[0]):
            self._value(mid, Stage.NORMED, after[0].path, "output", after[0].outputs[0])
        last = blocks[-1]
        self._value(post, Stage.BRANCH, last.path, "output", last.outputs[0])
        self._value(post, Stage.STREAM, layer, "output", entry)
        values = (entry, out, after[0].inputs[0], last.outputs[0], self._exit(number))
        if any(v is None or tuple(v.shape) != self._shape for v in values):
            return _FORM
        return None

    def _value(
        self, table: Table, stage: Stage, path: str, side: Side, like: Tensor
    ) -> None:
        self.places.values[table, stage] = Value(path, side, like.shape[1])

    def _heads(self, number: int, layer: str, width: int, ranks: int) -> None:
        table = Table("heads", number)
        if ranks > 1:
            reason = "under tensor parallelism a rank holds only its own heads"
            self.places.missing[table, Stage.BRANCH] = reason
            return
        paths = self._decoder.attention(layer)
        calls = [c for path in paths if (c := self._recording.only(path)) is not None]
        shape = None if self._shape is None else (self._shape[0], width)
        for call in calls:
            if call.outputs and tuple(call.outputs[0].shape) == shape:
                self._value(table, Stage.BRANCH, call.path, "output", call.outputs[0])
                return
        self.places.missing[table, Stage.BRANCH] = (
            "the attention's output is not a [tokens, heads * head_dim] value"
        )

    def _router(self, number: int, layer: str, num_experts: int) -> None:
        table, reason = Table("router", number), "the model has no experts"
        if num_experts:
            reason = "no module of the layer gives [tokens, experts] logits"
        shape = None if self._shape is None else (self._shape[0], num_experts)
        for path, refused in router_modules(self._decoder.model, layer).items():
            call = self._recording.only(path)
            if refused is not None:
                reason = refused
            elif call and call.outputs and tuple(call.outputs[0].shape) == shape:
                self._value(table, Stage.BRANCH, path, "output", call.outputs[0])
                return
        self.places.missing[table, Stage.BRANCH] = reason


def _taken(value: Tensor, call: Call) -> bool:
    """Whether a call takes the value."""
    return any(_same(value, taken) for taken in call.inputs)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two recorded tensors are one value."""
    return (
        a is not None
        and b is not None
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
    )
