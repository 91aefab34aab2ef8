"""Tiny random models in Hugging Face folders: every architecture, no download.

The weights are drawn so that the models behave: branches weigh about as much as the
stream they are added to, logits are peaked but not degenerate, and no norm weight or
bias has a value (1 or 0) that would hide a mistake. There is no tokenizer, and no
token id ends a generation.
"""

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

NUM_LAYERS: Final = 4
HIDDEN_SIZE: Final = 128
VOCAB_SIZE: Final = 512
MAX_POSITIONS: Final = 512

# 32 is the smallest head that vLLM's CPU attention accepts.
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 32
_INTERMEDIATE: Final = 128

_MATRIX_STD: Final = 0.15
_EMBEDDING_STD: Final = 0.3
_VECTOR_STD: Final = 0.2

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": _MATRIX_STD,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_GROUPED: Final[dict[str, Any]] = _COMMON | {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
}

_GEMMA: Final[dict[str, Any]] = _GROUPED | {
    "query_pre_attn_scalar": _HEAD_DIM,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    "sliding_window": MAX_POSITIONS,
}

_CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", _GROUPED | {"tie_word_embeddings": False}),
    "qwen2": (
        "Qwen2Config",
        {key: value for key, value in _GROUPED.items() if key != "head_dim"}
        | {"tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", _GROUPED | {"tie_word_embeddings": False}),
    "mixtral": (
        "MixtralConfig",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _GROUPED
        | {
            "tie_word_embeddings": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": _INTERMEDIATE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gpt2": (
        "GPT2Config",
        _COMMON
        | {
            "n_embd": HIDDEN_SIZE,
            "n_inner": _INTERMEDIATE,
            "n_layer": NUM_LAYERS,
            "n_head": _HEADS,
            "n_positions": MAX_POSITIONS,
        },
    ),
    "opt": (
        "OPTConfig",
        {key: value for key, value in _COMMON.items() if key != "initializer_range"}
        | {
            "hidden_size": HIDDEN_SIZE,
            "ffn_dim": _INTERMEDIATE,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": _HEADS,
            "max_position_embeddings": MAX_POSITIONS,
            "do_layer_norm_before": True,
            "init_std": _MATRIX_STD,
        },
    ),
}

NAMES: Final[tuple[str, ...]] = tuple(_CONFIGS)


def make(
    name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write the model `name` to `folder` and return the folder.

    Args:
        name: one of `NAMES`.
        folder: created if missing.
        seed: the same seed gives the same weights, up to the rounding of `dtype`.
        dtype: of the stored weights, named in config.json.

    Raises:
        KeyError: unknown name.
    """
    class_name, settings = _CONFIGS[name]
    config: PreTrainedConfig = getattr(transformers, class_name)(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    model.to(dtype).save_pretrained(folder)
    return folder


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = _distribution(name, parameter, gemma)
            parameter.copy_(
                mean + std * torch.randn(parameter.shape, generator=generator)
            )


def _distribution(name: str, parameter: Tensor, gemma: bool) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's entries."""
    if name.endswith("bias"):
        return 0.0, _VECTOR_STD
    if parameter.dim() == 1 and gemma:
        # Gemma adds 1 to norm weights; the final norm's make up for small embeddings.
        return (12.0 if name == "model.norm.weight" else 0.0), _VECTOR_STD
    if parameter.dim() == 1:
        return 1.0, _VECTOR_STD
    if any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
        # Gemma scales embeddings by sqrt(hidden) and ties the head to them: larger
        # ones would make every token predict itself.
        return 0.0, 0.025 if gemma else _EMBEDDING_STD
    return 0.0, _MATRIX_STD
