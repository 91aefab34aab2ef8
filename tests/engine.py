"""A real vLLM engine on a tiny model, in this process, and what it answers.

The engine compiles with Dynamo's `eager` backend unless told otherwise: the graph that
is spliced is the same, and a start takes seconds.
"""

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tests.oracle import Intervention, Oracle
from tests.tiny_models import VOCAB_SIZE

QUICK: Final[Mapping[str, Any]] = {"mode": 2, "backend": "eager"}
"""The compilation config of a quick start on a CPU."""

ENGINE_OPTIONS: Final[Mapping[str, Any]] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_logprobs": -1,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "compilation_config": QUICK,
    "seed": 0,
}
"""What every engine of the tests is started with, unless a test says otherwise."""

_groups = tempfile.TemporaryDirectory(prefix="eyesplice-groups-")


@dataclass(frozen=True)
class Ask:
    """One request: greedy, with the log-probabilities of the whole vocabulary.

    `spec` is the value of the key `eyesplice`, None for a plain request. Asking for
    `prompt_logprobs` keeps vLLM from reading the prefix cache.
    """

    prompt: Sequence[int]
    spec: object = None
    max_tokens: int = 6
    prompt_logprobs: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        prompt: the prompt's tokens.
        tokens: the generated tokens.
        logprobs: `[positions, vocab]`; row i is the distribution of the token after
            position `first + i`.
        first: 0, or the prompt's last position when its logprobs were not asked for.
        cached: prompt tokens that came from the prefix cache.
        eyesplice: the answer of the functions, None for a plain request.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Tensor
    first: int
    cached: int
    eyesplice: Any = None


class Engine:
    """A running engine."""

    def __init__(self, model: Path, **options: Any) -> None:
        from eyesplice.integration.plugin import register

        # vLLM does it through the entry point, if the package is installed.
        register()
        from vllm import LLM

        _inspect_models_here()
        _join_process_groups()
        self.model = model
        self.llm = LLM(str(model), **{**ENGINE_OPTIONS, **options})
        # It would take the process groups from the other engines of this process.
        self.llm.llm_engine.engine_core._finalizer.detach()

    def ask(self, *asks: Ask) -> list[Answer]:
        """The answers to requests that are handed over together."""
        prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        params = [_sampling_params(ask) for ask in asks]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [_answer(output) for output in outputs]

    def alone(self, *asks: Ask) -> list[Answer]:
        """The answers to requests that are served one after the other."""
        return [self.ask(ask)[0] for ask in asks]

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self._core.scheduler

    @property
    def router(self) -> Any:
        """What routes steps to programs, in the worker."""
        return self._core.model_executor.driver_worker.worker.eyesplice_router

    @property
    def report(self) -> Any:
        """The site table that the worker holds."""
        return self._core.model_executor.driver_worker.worker.eyesplice.report

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @contextmanager
    def steps(self) -> Iterator[list[Any]]:
        """Collects the scheduler's output of every step inside the block."""
        seen: list[Any] = []
        scheduler, original = self.scheduler, self.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            seen.append(original(*args, **kwargs))
            return seen[-1]

        scheduler.schedule = schedule
        try:
            yield seen
        finally:
            del scheduler.schedule

    def close(self) -> None:
        """Give the engine's memory back."""
        del self.llm
        # vLLM freezes what lives when an engine starts.
        gc.unfreeze()
        gc.collect()


def _inspect_models_here() -> None:
    """Spare a process of seconds per architecture, which protects a GPU's start only."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _join_process_groups() -> None:
    """Make the groups that all engines of this process share, experts' included."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    if distributed.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        store = f"file://{_groups.name}/store"
        distributed.init_distributed_environment(1, 0, store, 0, "gloo")
        distributed.initialize_model_parallel(backend="gloo")


@contextmanager
def engine(
    model: Path, eyesplice: Mapping[str, object] | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine for the length of a block.

    Args:
        model: a model's folder.
        eyesplice: the plugin's configuration; None leaves it switched off.
        options: of `vllm.LLM`.
    """
    if eyesplice is not None:
        options["additional_config"] = {"eyesplice": dict(eyesplice)}
    running = Engine(model, **options)
    try:
        yield running
    finally:
        running.close()


def _sampling_params(ask: Ask) -> Any:
    from vllm import SamplingParams

    extra = dict(ask.extra)
    if ask.spec is not None:
        extra["eyesplice"] = ask.spec
    return SamplingParams(
        temperature=0,
        max_tokens=ask.max_tokens,
        logprobs=-1,
        prompt_logprobs=-1 if ask.prompt_logprobs else None,
        flat_logprobs=True,
        detokenize=False,
        extra_args=extra or None,
    )


def _answer(output: Any) -> Answer:
    prompt = tuple(output.prompt_token_ids)
    completion = output.outputs[0]
    generated = _rows(completion.logprobs)
    asked = output.prompt_logprobs is not None
    parts = [_rows(output.prompt_logprobs), generated] if asked else [generated]
    return Answer(
        prompt,
        tuple(completion.token_ids),
        torch.cat(parts),
        0 if asked else len(prompt) - 1,
        output.num_cached_tokens or 0,
        getattr(output, "eyesplice", None),
    )


def _rows(flat: Any) -> Tensor:
    """`[positions, vocab]` of vLLM's flat lists, positions without values left out."""
    token_ids, values = torch.tensor(flat.token_ids), torch.tensor(flat.logprobs)
    every = zip(flat.start_indices, flat.end_indices, strict=True)
    spans = [(start, stop) for start, stop in every if stop > start]
    rows = torch.full((len(spans), VOCAB_SIZE), torch.nan)
    for row, (start, stop) in zip(rows, spans, strict=True):
        row[token_ids[start:stop]] = values[start:stop]
    assert not rows.isnan().any()
    return rows


def judged(
    oracle: Oracle, answer: Answer, *interventions: Intervention
) -> tuple[Tensor, Tensor]:
    """The answer's log-probabilities and the oracle's for the same tokens."""
    token_ids = (*answer.prompt, *answer.tokens)[:-1]
    expected = oracle.logprobs(token_ids, len(answer.prompt), interventions)
    return answer.logprobs, expected[answer.first :]


def assert_judged(
    oracle: Oracle,
    answer: Answer,
    *interventions: Intervention,
    tolerance: float = 1e-4,
    label: str = "",
) -> None:
    """The oracle gives the same log-probabilities, and would choose the same tokens.

    Args:
        oracle: of the same model.
        answer: the engine's.
        interventions: what the request asked for.
        tolerance: largest absolute difference of a log-probability.
        label: names the case in a failure.
    """
    got, expected = judged(oracle, answer, *interventions)
    assert got.shape == expected.shape, label
    worst = float((got - expected).abs().max())
    assert worst <= tolerance, f"{label}: logprobs differ by {worst:.2e}"
    start = len(answer.prompt) - 1 - answer.first
    chosen = expected[start:].gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    short = float((expected[start:].max(dim=1).values - chosen).max())
    assert short <= tolerance, f"{label}: another token is likelier by {short:.2e}"


def distance(a: Answer, b: Answer) -> float:
    """The largest difference of a log-probability at the positions that are alike.

    Those are the positions up to the first generated token that differs.
    """
    assert a.prompt == b.prompt and a.first == b.first
    same = 0
    for left, right in zip(a.tokens, b.tokens, strict=False):
        if left != right:
            break
        same += 1
    rows = min(len(a.prompt) - a.first + same, len(a.logprobs), len(b.logprobs))
    return float((a.logprobs[:rows] - b.logprobs[:rows]).abs().max())


def assert_same(a: Answer, b: Answer, tolerance: float = 1e-4, label: str = "") -> None:
    """Equal tokens, and log-probabilities within the tolerance."""
    assert a.tokens == b.tokens, f"{label}: other tokens"
    assert a.logprobs.shape == b.logprobs.shape, label
    worst = distance(a, b)
    assert worst <= tolerance, f"{label}: logprobs differ by {worst:.2e}"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens; the same seed gives the same ones."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def write(
    vector: str, layers: object, submodule: str = "residual.post", **more: object
) -> dict[str, object]:
    """One entry of a request's `writes`."""
    return {"vector": vector, "layers": layers, "submodule": submodule, **more}


def asking(*writes: Mapping[str, object]) -> dict[str, object]:
    """A request's object with these writes."""
    return {"writes": [dict(item) for item in writes]}
