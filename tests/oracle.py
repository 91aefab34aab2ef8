"""The independent judge: interventions as plain PyTorch hooks on transformers models.

Nothing here knows the package under test. A value is named as in its contract: a
submodule and a decoder layer. The model runs in fp32 with eager attention, one whole
forward pass per question and no cache, so there is little to get wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

SUBMODULES: Final = (
    "residual.pre",
    "attention.pre",
    "attention.post",
    "residual.mid",
    "mlp.pre",
    "mlp.post",
    "residual.post",
)
"""The submodules the oracle can reach, in the order of the forward pass."""

Edit = Callable[[Tensor, Tensor, int], Tensor]
"""`(h [tokens, hidden] fp32, positions [tokens], prompt_len) -> [tokens, hidden]`."""

Mask = Callable[[Tensor, int], Tensor]
"""`(positions [tokens], prompt_len) -> bool [tokens]`."""


@dataclass(frozen=True)
class Intervention:
    """An edit of one value of one decoder layer; negative layers count from the end.

    Several at one place run in the order they are given.
    """

    submodule: str
    layer: int
    fn: Edit


@dataclass(frozen=True)
class Anatomy:
    """Where a model keeps its layers, and which module outputs each value of one.

    `attention_post` and `mlp_post` are the modules whose output is added to the stream.
    """

    layers: str
    final_norm: str
    attention_pre: str
    attention_post: str
    mlp_pre: str
    mlp_post: str


_PRE_NORM: Final = Anatomy(
    layers="model.layers",
    final_norm="model.norm",
    attention_pre="input_layernorm",
    attention_post="self_attn",
    mlp_pre="post_attention_layernorm",
    mlp_post="mlp",
)

_SANDWICH: Final = Anatomy(
    layers="model.layers",
    final_norm="model.norm",
    attention_pre="input_layernorm",
    attention_post="post_attention_layernorm",
    mlp_pre="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)

_GPT2: Final = Anatomy(
    layers="transformer.h",
    final_norm="transformer.ln_f",
    attention_pre="ln_1",
    attention_post="attn",
    mlp_pre="ln_2",
    mlp_post="mlp",
)

_OPT: Final = Anatomy(
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    attention_pre="self_attn_layer_norm",
    attention_post="self_attn",
    mlp_pre="final_layer_norm",
    mlp_post="fc2",
)

ANATOMIES: Final[dict[str, Anatomy]] = {
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "mixtral": _PRE_NORM,
    "qwen3_moe": _PRE_NORM,
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "gpt2": _GPT2,
    "opt": _OPT,
}
"""By the config's `model_type`."""


class Oracle:
    """A Hugging Face model folder, run in fp32 with interventions."""

    def __init__(self, model_dir: Path | str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config = self.model.config
        self.anatomy = ANATOMIES[config.model_type]
        if self.anatomy is _OPT and not config.do_layer_norm_before:
            raise ValueError("OPT with norms after the branches is not supported")
        self.layers: list[nn.Module] = list(
            self.model.get_submodule(self.anatomy.layers)
        )

    def logprobs(
        self,
        token_ids: Sequence[int],
        prompt_len: int,
        interventions: Sequence[Intervention] = (),
    ) -> Tensor:
        """Log-probabilities of the token after each of `token_ids`.

        Args:
            token_ids: prompt and generated tokens.
            prompt_len: how many of them are the prompt, in tokens.
            interventions: applied at every token; conditions are part of their `fn`.

        Returns:
            `[tokens, vocab]`, fp32, natural logarithms.
        """
        with torch.no_grad(), self._hooked(len(token_ids), prompt_len, interventions):
            logits: Tensor = self.model(
                torch.tensor([list(token_ids)]), use_cache=False
            ).logits[0]
        return logits.float().log_softmax(dim=-1)

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        interventions: Sequence[Intervention] = (),
    ) -> list[int]:
        """The `max_tokens` tokens that greedy decoding adds to the prompt."""
        token_ids = list(prompt_ids)
        for _ in range(max_tokens):
            logprobs = self.logprobs(token_ids, len(prompt_ids), interventions)
            token_ids.append(int(logprobs[-1].argmax()))
        return token_ids[len(prompt_ids) :]

    @contextmanager
    def _hooked(
        self, num_tokens: int, prompt_len: int, interventions: Sequence[Intervention]
    ) -> Iterator[None]:
        positions = torch.arange(num_tokens)
        edits: dict[int, list[Intervention]] = {}
        for item in interventions:
            if item.submodule not in SUBMODULES:
                raise ValueError(f"{item.submodule!r} is not one of {SUBMODULES}")
            number = range(len(self.layers))[item.layer]
            edits.setdefault(number, []).append(item)
        hooks = [
            _LayerHooks(self.layers[number], self.anatomy, items, positions, prompt_len)
            for number, items in edits.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _LayerHooks:
    """The hooks of one decoder layer for the duration of one forward pass."""

    def __init__(
        self,
        layer: nn.Module,
        anatomy: Anatomy,
        interventions: Sequence[Intervention],
        positions: Tensor,
        prompt_len: int,
    ) -> None:
        self.interventions = interventions
        self.positions = positions
        self.prompt_len = prompt_len
        self.stream: Tensor | None = None

        def module(name: str) -> nn.Module:
            return layer.get_submodule(name)

        self.handles = [
            layer.register_forward_pre_hook(self._enter),
            module(anatomy.attention_pre).register_forward_hook(
                self._output("attention.pre")
            ),
            module(anatomy.attention_post).register_forward_hook(self._attention),
            module(anatomy.mlp_pre).register_forward_hook(self._output("mlp.pre")),
            module(anatomy.mlp_post).register_forward_hook(self._output("mlp.post")),
            layer.register_forward_hook(self._output("residual.post")),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.stream = self._edit("residual.pre", args[0])
        return self.stream, *args[1:]

    def _output(
        self, submodule: str
    ) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return self._edit(submodule, output)

        return hook

    def _attention(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Edit the value that attention adds, then the sum that it will make.

        The stream after attention feeds a norm and a later sum, and no module outputs
        it: a change of it is made by changing the value added to it. A token whose
        sum is not edited keeps its exact bits.
        """
        assert self.stream is not None
        value = output[0] if isinstance(output, tuple) else output
        value = self._edit("attention.post", value)
        mid = self.stream + value
        value = value + (self._edit("residual.mid", mid) - mid)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    def _edit(self, submodule: str, value: Tensor) -> Tensor:
        """This place's interventions on `value`, which may have a batch dimension."""
        rows = value.reshape(self.positions.shape[0], -1)
        for item in self.interventions:
            if item.submodule == submodule:
                edited = item.fn(rows, self.positions, self.prompt_len)
                assert edited.shape == rows.shape
                rows = edited
        return rows.view(value.shape)


def add(v: Tensor, scale: float = 1.0) -> Edit:
    """h + scale * v, with v `[hidden]`."""
    return lambda h, positions, prompt_len: h + scale * v.float()


def ablate(v: Tensor, scale: float = 1.0) -> Edit:
    """h - scale * (v.h) v / |v|^2: at scale 1, h without its part along v."""
    w = v.float()

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        return h - scale * torch.outer(h @ w, w) / w.dot(w)

    return fn


def clamp(v: Tensor, lo: float, hi: float) -> Edit:
    """h moved along v until its projection v.h / |v| lies in [lo, hi]."""
    unit = v.float() / v.float().norm()

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        projection = h @ unit
        return h + torch.outer(projection.clamp(lo, hi) - projection, unit)

    return fn


def one_sided(v: Tensor, offset: float = 0.0, scale: float = 1.0) -> Edit:
    """h - scale * relu(v.h / |v| - offset) v / |v|."""
    unit = v.float() / v.float().norm()

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        return h - scale * torch.outer((h @ unit - offset).relu(), unit)

    return fn


def record(into: list[Tensor]) -> Edit:
    """No edit: appends a copy of the value to `into` at every forward pass."""

    def fn(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        into.append(h.clone())
        return h

    return fn


def where(fn: Edit, mask: Mask) -> Edit:
    """`fn` for the tokens in `mask`; the others keep their exact bits."""

    def conditional(h: Tensor, positions: Tensor, prompt_len: int) -> Tensor:
        chosen = mask(positions, prompt_len)[:, None]
        return torch.where(chosen, fn(h, positions, prompt_len), h)

    return conditional


def all_tokens(positions: Tensor, prompt_len: int) -> Tensor:
    """Every token."""
    return torch.ones_like(positions, dtype=torch.bool)


def prompt(positions: Tensor, prompt_len: int) -> Tensor:
    """The prompt's tokens."""
    return positions < prompt_len


def generated(positions: Tensor, prompt_len: int) -> Tensor:
    """The tokens after the prompt."""
    return positions >= prompt_len


def last_token(positions: Tensor, prompt_len: int) -> Tensor:
    """The prompt's last token."""
    return positions == prompt_len - 1


def positions(start: int, stop: int) -> Mask:
    """Positions start <= p < stop; negative bounds count from the prompt's end."""

    def mask(at: Tensor, prompt_len: int) -> Tensor:
        first, end = (n + prompt_len if n < 0 else n for n in (start, stop))
        return (first <= at) & (at < end)

    return mask
