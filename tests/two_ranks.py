"""One model on two worker processes, asked by hand: `python -m tests.two_ranks FILE`.

Reads `model`, `vectors` and `asks` from the JSON file; prints one JSON line with the
answers and with what each rank's tables hold after the last step. A program of its own,
because an engine on two ranks cannot share a process with others.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


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
    """Start the engine, ask, print."""
    given = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    from tests.engine import ENGINE_OPTIONS

    llm = LLM(
        given["model"],
        **ENGINE_OPTIONS,
        tensor_parallel_size=2,
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
    print(json.dumps({"answers": answers, "ranks": ranks}), flush=True)


if __name__ == "__main__":
    # A function is sent to the workers, by this process alone.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    main()
