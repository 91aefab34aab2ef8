"""A stand-in of vLLM's configuration, and apps for the model that it describes."""

from types import SimpleNamespace

import torch

import eyesplice
from eyesplice import App
from eyesplice.fx_passes.report import SiteRow, SpliceReport
from eyesplice.integration.config import parse_config
from eyesplice.integration.deployment import Deployment

LAYERS, HIDDEN, HEADS, EXPERTS, VOCABULARY = 4, 8, 12, 4, 70


def vllm_config(experts=0, additional_config=None, **model):
    text = SimpleNamespace(
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_local_experts=experts,
        num_experts_per_tok=2 if experts else 0,
    )
    model_config = SimpleNamespace(
        **{
            "dtype": torch.float32,
            "hf_text_config": text,
            "hf_config": SimpleNamespace(to_json_string=lambda **_: "{}"),
            "get_hidden_size": lambda: HIDDEN,
            "get_head_size": lambda: HEADS // 3,
            "get_vocab_size": lambda: VOCABULARY,
            "skip_tokenizer_init": True,
            **model,
        }
    )
    return SimpleNamespace(
        additional_config=additional_config,
        model_config=model_config,
        compilation_config=SimpleNamespace(mode=3, max_cudagraph_capture_size=512),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
    )


def steer(name="steer", seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(HIDDEN, generator=generator)
    function = eyesplice.write("steering_vector", vector="v", **fields).layers(1)
    return App(name, [function], {"v": vector})


def build(config, **kind):
    return Deployment.build(parse_config(config), vllm_config(**kind))


def all_armed(deployment):
    rows = tuple(SiteRow(site, "fused") for site in sorted(deployment.wanted))
    return SpliceReport(rows, len(rows), 0)
