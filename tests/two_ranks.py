"""One model on two worker processes, asked by hand: `python -m tests.two_ranks FILE`.

Reads `model`, `vectors`, `asks` and `options` of the engine from the JSON file, and puts in
its place the answers and what each rank's tables hold after the last step. A program of
its own, because an engine on two ranks cannot share a process with others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.engine import Ask, prompt, write

ROOT: Final = Path(__file__).parents[1]

_DOT: Final = {
    "read": "dot",
    "name": "p",
    "weight": "v1",
    "layers": [1],
    "submodule": "residual.post",
}


def _gated(gate: str) -> dict[str, Any]:
    return {
        "reads": [_DOT],
        "writes": [{**write("v2", [2]), "scale": 3.0, "gate": gate}],
    }


ASKS: Final = (
    Ask(prompt(9, 1), None, max_tokens=12),
    Ask(prompt(12, 2), {"writes": [write("v0", "all")]}, max_tokens=12),
    Ask(prompt(7, 3), {"writes": [{**write("v3", [2]), "write": "ablate"}]}, 12),
    Ask(prompt(20, 4), _gated("p >= 0"), max_tokens=12),
    Ask(prompt(20, 5), _gated("p.mean >= -15"), max_tokens=12),
    Ask(prompt(20, 6), _gated("latch(p >= 80)"), max_tokens=12),
)
"""A plain request, a vector at every layer, an ablation, and gates of three kinds."""


def asked(
    file: Path,
    model: Path,
    vectors: Path,
    options: Mapping[str, Any],
    env: Mapping[str, str],
) -> dict[str, Any]:
    """What this program answers to ASKS, run in a process of its own.

    Args:
        file: what it reads and writes.
        model, vectors: folders.
        options: of the engine.
        env: its environment.
    """
    requests = [
        {"prompt": list(a.prompt), "spec": a.spec, "max_tokens": a.max_tokens}
        for a in ASKS
    ]
    given = {"model": str(model), "vectors": str(vectors), "asks": requests}
    file.write_text(json.dumps(given | {"options": dict(options)}))
    command = [sys.executable, "-m", "tests.two_ranks", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def tables(worker: Any) -> dict[str, Any]:
    """Receipts, conditions and scores of one rank, as lists."""
    buffers = worker.eyesplice_buffers
    score = buffers.score[:64].nan_to_num(nan=-1.0)
    return {
        "counts": buffers.counts.tolist(),
        "select": buffers.select[:64].tolist(),
        "score": score.tolist(),
    }


def main() -> None:
    """Start the engine, ask, write."""
    file = Path(sys.argv[1])
    given = json.loads(file.read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(
        given["model"],
        **given["options"],
        distributed_executor_backend="mp",
        additional_config={"eyesplice": {"vectors": given["vectors"]}},
    )
    prompts = [{"prompt_token_ids": ask["prompt"]} for ask in given["asks"]]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=ask["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args={"eyesplice": ask["spec"]} if ask["spec"] else None,
        )
        for ask in given["asks"]
    ]
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (text,) = output.outputs
        tokens = list(text.token_ids)
        rows = zip(text.logprobs, tokens, strict=True)
        answers.append(
            {
                "tokens": tokens,
                "logprobs": [row[token].logprob for row, token in rows],
                "eyesplice": getattr(output, "eyesplice", None),
            }
        )
    ranks = llm.collective_rpc(tables)
    file.write_text(json.dumps({"answers": answers, "ranks": ranks}))


if __name__ == "__main__":
    # A function is sent to the workers, by this process alone.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    main()
