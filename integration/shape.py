"""What eyesplice needs to know of a model before it is loaded."""

from dataclasses import dataclass
from typing import Any

from eyesplice.fx_passes.sites import SUBMODULES, Submodule

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN_KEYS = ("num_experts_per_tok", "experts_per_token", "moe_topk")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model's decoder.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        heads_width: query heads times head size, over all ranks.
        num_experts: experts of a mixture layer, 0 for a dense model.
        experts_per_token: experts that each token goes to, 0 for a dense model.
        vocab_size: token ids are 0 to vocab_size - 1.
    """

    num_layers: int
    hidden_size: int
    heads_width: int
    num_experts: int
    experts_per_token: int
    vocab_size: int

    @classmethod
    def of(cls, vllm_config: Any) -> "ModelShape":
        """Read the sizes from a `VllmConfig`."""
        model = vllm_config.model_config
        text = model.hf_text_config
        return cls(
            num_layers=int(text.num_hidden_layers),
            hidden_size=int(model.get_hidden_size()),
            heads_width=int(text.num_attention_heads) * int(model.get_head_size()),
            num_experts=_largest(text, _EXPERT_KEYS),
            experts_per_token=_largest(text, _PER_TOKEN_KEYS),
            vocab_size=int(model.get_vocab_size()),
        )

    def widths(self) -> dict[Submodule, int]:
        """Elements per token at each submodule."""
        special: dict[Submodule, int] = {
            "attention.heads": self.heads_width,
            "router.logits": self.num_experts,
        }
        return {name: special.get(name, self.hidden_size) for name in SUBMODULES}


def _largest(config: Any, keys: tuple[str, ...]) -> int:
    return max(int(getattr(config, key, 0) or 0) for key in keys)
