"""The engine's side of `eyesplice demo`: one prompt, several requests, one batch."""

import sys
import time
from typing import Any, Final

from eyesplice.integration.cli.engine_options import engine_options, on_cpu
from eyesplice.integration.cli.jobs import GenerateJob

_PLUGIN: Final = "eyesplice.integration.plugin"


def generate(job: GenerateJob, found: dict[str, Any]) -> None:
    """Serve the job's requests greedily in one batch.

    Args:
        job: model, prompt and requests; without vectors nothing of vLLM is touched.
        found: filled in; each output has its text, token ids and the log-probability
            of each token, in nats.
    """
    options: dict[str, Any] = {}
    if job.vectors is not None:
        from eyesplice.integration.plugin import register

        register()
        options["additional_config"] = {"eyesplice": {"vectors": job.vectors}}
    import vllm

    began = time.monotonic()
    found["device"] = "cpu" if on_cpu() else "cuda"
    found["dtype"] = "float32" if on_cpu() else "bfloat16"
    engine = vllm.LLM(**engine_options(job.model), **options, dtype=found["dtype"])
    found["start_seconds"] = time.monotonic() - began
    parameters = [_parameters(vllm.SamplingParams, job, r) for r in job.requests]
    if job.chat:
        prompts: list[Any] = [[{"role": "user", "content": job.prompt}]]
        serve = engine.chat
    else:
        prompts = [job.prompt]
        serve = engine.generate
    outputs = serve(prompts * len(parameters), parameters, use_tqdm=False)
    found["outputs"] = [_plain(output.outputs[0]) for output in outputs]
    found["spliced"] = _PLUGIN in sys.modules
    if job.vectors is not None:
        from eyesplice.integration.cli.inspect_engine import describe
        from eyesplice.integration.session import current_session

        found["table"] = describe(current_session().require_report())


def _parameters(kind: Any, job: GenerateJob, request: dict[str, Any] | None) -> Any:
    extra = None if request is None else {"eyesplice": request}
    return kind(
        max_tokens=job.max_tokens, temperature=0.0, logprobs=0, extra_args=extra
    )


def _plain(completion: Any) -> dict[str, Any]:
    tokens = list(completion.token_ids)
    chosen = zip(completion.logprobs, tokens, strict=True)
    return {
        "text": completion.text,
        "tokens": tokens,
        "logprobs": [step[token].logprob for step, token in chosen],
    }
