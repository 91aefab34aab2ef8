"""Make the demo's sentiment direction and measure what it does to generated text.

Recipe (difference of means, Marks and Tegmark 2023, arXiv 2310.06824, sec. 5):

    v = mean over positive phrases of h  -  mean over negative phrases of h

with h the residual stream leaving one decoder layer (`residual.post`), at the last
token of a short phrase, in fp32. Writes `sentiment.safetensors` and its passport
`sentiment.json`, then prints the mean VADER compound score of ten neutral prompts
continued greedily, and the four texts of the demo prompt. Needs neither vLLM nor a GPU.

    python scripts/make_sentiment.py                # fetches the demo model
    python scripts/make_sentiment.py --model DIR --output DIR
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eyesplice.integration.model_fetch import MODEL_NAME, fetch_smollm2

ASSETS: Final = Path(__file__).resolve().parent.parent / "integration" / "assets"
LAYER: Final = 10
SUBMODULE: Final = "residual.post"
SCORED_TOKENS: Final = 40
DEMO_TOKENS: Final = 48
DEMO_PROMPT: Final = "The weather today is"

POSITIVE: Final = (
    "I love this so much",
    "What a wonderful day",
    "This is the best meal I have ever had",
    "She was delighted with the gift",
    "The film was brilliant and moving",
    "I am so happy to see you",
    "Everything went perfectly",
    "The staff were kind and helpful",
    "It was a beautiful morning",
    "He is proud of his great success",
    "The garden looks gorgeous",
    "We had an amazing holiday",
    "The music was lovely",
    "I feel grateful and full of joy",
    "Their service is excellent",
    "The children laughed with delight",
    "This book is a pleasure to read",
    "You did a fantastic job",
    "The news made everyone cheerful",
    "It tastes delicious",
    "The team celebrated a great victory",
    "My friend is generous and warm",
    "The view is magnificent",
    "I am hopeful about the future",
)
NEGATIVE: Final = (
    "I hate this so much",
    "What a terrible day",
    "This is the worst meal I have ever had",
    "She was disgusted with the gift",
    "The film was boring and stupid",
    "I am so sad to lose you",
    "Everything went horribly wrong",
    "The staff were rude and useless",
    "It was a dreadful morning",
    "He is ashamed of his awful failure",
    "The garden looks ugly",
    "We had a miserable holiday",
    "The music was annoying",
    "I feel bitter and full of pain",
    "Their service is horrible",
    "The children cried with fear",
    "This book is a chore to read",
    "You did a lousy job",
    "The news made everyone angry",
    "It tastes disgusting",
    "The team suffered a crushing defeat",
    "My enemy is cruel and cold",
    "The view is depressing",
    "I am hopeless about the future",
)
NEUTRAL: Final = (
    "The train arrived at the station and",
    "Yesterday I went to the market and",
    "The weather today is",
    "My neighbour told me that",
    "The new phone is",
    "When I opened the door,",
    "The meeting this afternoon was",
    "I think that the city",
    "The restaurant on the corner",
    "After the film, we",
)

Edit = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the model: an edit of h at the outputs of some layers."""

    name: str
    layers: tuple[int, ...]
    edit: Edit


class Subject:
    """A causal model in fp32 on the CPU, with edits at the outputs of its layers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self.model.eval()
        self.layers: Any = self.model.model.layers

    def last_token_mean(self, phrases: Sequence[str], layer: int) -> Tensor:
        """Mean over phrases of the stream leaving `layer`: fp32 `[hidden]`."""
        rows: list[Tensor] = []

        def keep(h: Tensor) -> Tensor:
            rows.append(h[0, -1].clone())
            return h

        with self.edited(Variant("read", (layer,), keep)), torch.no_grad():
            for phrase in phrases:
                self.model(**self.tokenizer(phrase, return_tensors="pt"))
        return torch.stack(rows).mean(dim=0)

    @contextmanager
    def edited(self, variant: Variant) -> Iterator[None]:
        """Apply the variant's edit at the output of each of its layers."""

        def hook(_module: object, _args: object, output: Any) -> Any:
            if isinstance(output, tuple):
                return (variant.edit(output[0]), *output[1:])
            return variant.edit(output)

        handles = [self.layers[i].register_forward_hook(hook) for i in variant.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def continuations(
        self, prompts: Sequence[str], variant: Variant, num_tokens: int
    ) -> list[str]:
        """Greedy continuations of `num_tokens` tokens, without the prompts."""
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        with self.edited(variant), torch.no_grad():
            tokens = self.model.generate(
                **batch, max_new_tokens=num_tokens, do_sample=False
            )
        new = tokens[:, batch["input_ids"].shape[1] :]
        texts: list[str] = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts


def variants(v: Tensor, layer: int, num_layers: int) -> tuple[Variant, ...]:
    """The four variants of the demo for the direction `v`, fp32 `[hidden]`."""
    unit = v / v.norm()

    def ablate(h: Tensor) -> Tensor:
        return h - (h @ unit)[..., None] * unit

    return (
        Variant("plain", (), lambda h: h),
        Variant("+1", (layer,), lambda h: h + v),
        Variant("-1", (layer,), lambda h: h - v),
        Variant("ablated", tuple(range(num_layers)), ablate),
    )
