"""Sentiment, steered for real: extract, probe, guard, ablate, and count what happened.

Everything is taken from the model through eyesplice. A first engine captures the residual
stream at the last token of 24 positive and 24 negative phrases. From these rows come a
steering vector (difference of means) and a linear probe (logistic regression). A second
engine serves 30 held-out prompts, ten each that begin neutral, negative and positive:

    plain     nothing
    steered   h += v at every token
    guarded   h += v only at tokens where the probe, one layer before, says "negative"
    ablated   the vector's direction taken out at every layer

and prints the mean VADER compound score of the texts (-1 to 1) and, for the guarded
write, the share of tokens on which it acted: the count that the kernel made.

    python docs/examples/sentiment.py                 # fetches SmolLM2-135M-Instruct
    python docs/examples/sentiment.py --model FOLDER --json out.json
"""

import argparse
import base64
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import eyesplice as m

READ_LAYER, WRITE_LAYER = 9, 10
TOKENS = 40
PROMPTS = {
    "neutral": (
        "The bus stopped at the corner and",
        "On Monday the office",
        "The report says that",
        "My sister called to tell me",
        "The package on the table",
        "In the evening we",
        "The teacher looked at the class and",
        "At the airport, the passengers",
        "The letter began with",
        "The shop across the street",
    ),
    "negative": (
        "The food was cold and the waiter",
        "He lost his job and",
        "The storm destroyed the village, and",
        "I was angry because",
        "The patient was in pain and",
        "Nobody came to her party, so",
        "The hotel room was dirty and",
        "After the accident, the family",
        "The team lost again and the fans",
        "The dog was sick and",
    ),
    "positive": (
        "The concert was wonderful and",
        "She won the prize and",
        "The baby smiled and",
        "We enjoyed the sunny beach and",
        "The cake was delicious and",
        "He was proud of his daughter because",
        "The rescue was a success, and",
        "Our friends welcomed us and",
        "The garden was full of flowers and",
        "The holiday was perfect and",
    ),
}


def main() -> None:
    """Run both engines and print the table."""
    options = _options()
    phrases = json.loads(
        (files("eyesplice.integration.assets") / "phrases.json").read_text()
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = _captured(options.model, phrases)
        app_folder = _app(rows, Path(folder) / "sentiment")
        results = _served(options.model, app_folder)
    _print(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.model is None:
        from eyesplice.integration.model_fetch import fetch_smollm2

        options.model = fetch_smollm2()
    return options


def _engine(model: Path, config: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    # On a CPU, without Inductor: a start in seconds. On a GPU, as vLLM does by default.
    cpu = {"compilation_config": {"mode": 2, "backend": "eager"}, "dtype": "float32"}
    return LLM(
        str(model),
        max_model_len=256,
        max_num_seqs=32,
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.2,
        disable_log_stats=True,
        additional_config={"eyesplice": config},
        **(cpu if current_platform.is_cpu() else {}),
    )


def _ask(llm: Any, prompts: Sequence[str], request: Any, tokens: int) -> Any:
    from vllm import SamplingParams

    extra = None if request is None else {"eyesplice": request}
    params = SamplingParams(temperature=0, max_tokens=tokens, extra_args=extra)
    return llm.generate(list(prompts), params, use_tqdm=False)


def _captured(model: Path, phrases: dict[str, list[str]]) -> dict[str, Tensor]:
    """The stream leaving the two layers, by "kind layer": fp32 `[phrases, hidden]`."""
    llm = _engine(model, {})
    read = {"read": "capture", "when": "last_token", "submodule": "residual.post",
            "layers": [READ_LAYER, WRITE_LAYER]}  # fmt: skip
    rows = {}
    for kind, texts in phrases.items():
        outputs = _ask(llm, texts, {"reads": [read]}, 1)
        for layer in (READ_LAYER, WRITE_LAYER):
            hook = f"blocks.{layer}.hook_resid_post"
            found = [_tensor(out.eyesplice["captures"][hook]) for out in outputs]
            rows[f"{kind} {layer}"] = torch.cat(found)
    del llm
    return rows


def _tensor(capture: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(capture["data"]))
    dtype = getattr(torch, capture["dtype"])
    return torch.frombuffer(data, dtype=dtype).reshape(capture["shape"]).float()


def _app(rows: dict[str, Tensor], folder: Path) -> Path:
    """An app of a probe and a write that it guards, fitted to the rows."""
    from eyesplice.integration.apps import orgad

    vector = rows[f"positive {WRITE_LAYER}"].mean(0)
    vector = vector - rows[f"negative {WRITE_LAYER}"].mean(0)
    probe = orgad.fit(rows[f"negative {READ_LAYER}"], rows[f"positive {READ_LAYER}"])
    negative = (
        m.read("probe", name="negative", weight="w", bias=float(probe.bias))
        .layers([READ_LAYER])
        .submodule("residual.post")
    )
    steer = (
        m.write("steering_vector", name="steer", vector="v")
        .layers([WRITE_LAYER])
        .submodule("residual.post")
    )
    guarded = m.App(
        "guarded",
        [negative, steer.cond(gate="negative >= 0")],
        tensors={"w": probe.weight, "v": vector},
    )
    steered = m.App("steered", [steer], tensors={"v": vector})
    ablate = m.write("ablate", vector="v").layers("all").submodule("residual.post")
    ablated = m.App("ablated", [ablate], tensors={"v": vector})
    for app in (steered, guarded, ablated):
        app.save(folder / app.name)
    return folder


def _served(model: Path, folder: Path) -> dict[str, Any]:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    vader = SentimentIntensityAnalyzer()
    apps = ["steered", "guarded", "ablated"]
    llm = _engine(model, {"apps": [str(folder / app) for app in apps]})
    prompts = [text for texts in PROMPTS.values() for text in texts]
    kinds = [kind for kind, texts in PROMPTS.items() for _ in texts]
    results: dict[str, Any] = {}
    for name in (None, *apps):
        outputs = _ask(llm, prompts, name, TOKENS)
        texts = [out.outputs[0].text for out in outputs]
        scores = [vader.polarity_scores(text)["compound"] for text in texts]
        mean = {
            kind: fmean(s for s, k in zip(scores, kinds, strict=True) if k == kind)
            for kind in PROMPTS
        }
        results[name or "plain"] = {
            "vader": {"all": fmean(scores), **mean},
            "written": None if name is None else _written(outputs, kinds),
            "example": prompts[10] + texts[10],
        }
    return results


def _written(outputs: Any, kinds: Sequence[str]) -> dict[str, float]:
    """Share of the tokens that were written, by kind of prompt, as counted on device."""
    share: dict[str, float] = {}
    for kind in PROMPTS:
        written = tokens = 0
        for out, k in zip(outputs, kinds, strict=True):
            if k == kind:
                written += out.eyesplice["writes"][0]["tokens"]
                tokens += len(out.prompt_token_ids) + len(out.outputs[0].token_ids) - 1
        share[kind] = written / tokens
    return share


def _print(results: dict[str, Any]) -> None:
    table = Table(title="mean VADER compound score (share of tokens written)")
    table.add_column("")
    for kind in ("all", *PROMPTS):
        table.add_column(kind, justify="right")
    for name, result in results.items():
        cells = [f"{result['vader']['all']:+.2f}"]
        for kind in PROMPTS:
            written = result["written"]
            share = f" ({100 * written[kind]:.0f}%)" if written else ""
            cells.append(f"{result['vader'][kind]:+.2f}{share}")
        table.add_row(name, *cells)
    console = Console(width=90)
    console.print(table)
    for name, result in results.items():
        console.print(f"[bold]{name}[/]: {result['example']}")


if __name__ == "__main__":
    main()
