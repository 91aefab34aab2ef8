"""A real small model: idle it is vLLM's own, steered it is what plain hooks make of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.engine import Engine, asking, engine, write
from tests.oracle import Intervention, Oracle, ablate, add

pytestmark = pytest.mark.engine

ASSETS: Final = Path(__file__).resolve().parents[2] / "integration" / "assets"
SENTIMENT: Final = load_file(ASSETS / "sentiment.safetensors")["sentiment"]
SHOWN: Final = 20
"""Likeliest tokens whose log-probabilities are asked for at each position."""

PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Q: What is 12 times 12?\nA:",
    "Photosynthesis is the process by which",
    "Ingredients: two eggs, a cup of flour,",
    "I went to the cinema last night, and the film was",
)

SPECS: Final[dict[str, object]] = {
    "plain": None,
    "+1": asking(write("sentiment", [10], scale=1.0)),
    "-1": asking(write("sentiment", [10], scale=-1.0)),
    "ablated": asking(write("sentiment", "all", write="ablate")),
}
HOOKS: Final = {
    "plain": [],
    "+1": [Intervention("residual.post", 10, add(SENTIMENT))],
    "-1": [Intervention("residual.post", 10, add(SENTIMENT, -1.0))],
    "ablated": [Intervention("residual.post", n, ablate(SENTIMENT)) for n in range(30)],
}


@dataclass(frozen=True)
class Said:
    """What came back; `rows[i]` holds log-probabilities of the token after position i.

    A row has the likeliest tokens and the one that follows, by token id.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: list[dict[int, float]]

    @property
    def chosen(self) -> list[float]:
        """The log-probability of every token but the first."""
        following = (*self.prompt, *self.tokens)[1:]
        return [row[token] for row, token in zip(self.rows, following, strict=True)]


def say(
    running: Engine, prompts: Sequence[Sequence[int]], specs: Sequence[object]
) -> list[Said]:
    """What the engine answers to one batch: greedy, 24 tokens each."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            logprobs=SHOWN,
            prompt_logprobs=SHOWN,
            detokenize=False,
            extra_args=None if spec is None else {"eyesplice": spec},
        )
        for spec in specs
    ]
    ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = running.llm.generate(ids, params, use_tqdm=False)
    return [_said(output) for output in outputs]


def _said(output: Any) -> Said:
    completion = output.outputs[0]
    # Nothing comes before the first token.
    positions = [*output.prompt_logprobs[1:], *completion.logprobs]
    rows = [{token: p.logprob for token, p in row.items()} for row in positions]
    return Said(tuple(output.prompt_token_ids), tuple(completion.token_ids), rows)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def spliced(smollm2: Path) -> Iterator[Engine]:
    with engine(smollm2, {"vectors": str(ASSETS)}) as running:
        yield running


@pytest.fixture(scope="module")
def steered(spliced: Engine, tokenizer: Any) -> dict[str, Said]:
    """The demo's prompt in one batch, plain and steered in three ways."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Describe the weather today."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    answers = say(spliced, [prompt] * len(SPECS), list(SPECS.values()))
    return dict(zip(SPECS, answers, strict=True))


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


def test_idle_it_answers_as_vllm(smollm2: Path, spliced: Engine, tokenizer: Any):
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    mine = say(spliced, prompts, [None] * len(prompts))
    with engine(smollm2) as vanilla:
        theirs = say(vanilla, prompts, [None] * len(prompts))
    for text, one, other in zip(PROMPTS, mine, theirs, strict=True):
        assert len(one.tokens) == 24, text
        assert one.tokens == other.tokens, text
        assert one.chosen == pytest.approx(other.chosen, rel=0, abs=1e-5), text


@pytest.mark.parametrize("name", SPECS)
def test_it_answers_as_plain_hooks(name: str, steered: dict[str, Said], oracle: Oracle):
    said = steered[name]
    token_ids = (*said.prompt, *said.tokens)[:-1]
    expected = oracle.logprobs(token_ids, len(said.prompt), HOOKS[name])
    following = (*said.prompt, *said.tokens)[1:]
    judged = [float(row[token]) for row, token in zip(expected, following, strict=True)]
    assert said.chosen == pytest.approx(judged, rel=0, abs=1e-4)
    # Greedy: no token was likelier than a generated one, but for rounding.
    start = len(said.prompt) - 1
    likeliest = expected[start:].max(dim=1).values.tolist()
    assert judged[start:] == pytest.approx(likeliest, rel=0, abs=1e-4)
    # Twenty times as many values reach further into the tail of the rounding.
    for position, row in enumerate(said.rows):
        shown = {token: float(expected[position, token]) for token in row}
        assert row == pytest.approx(shown, rel=0, abs=3e-4), position


def test_the_signs_and_nothing_give_three_texts(
    steered: dict[str, Said], tokenizer: Any
):
    texts = {tokenizer.decode(steered[name].tokens) for name in ("plain", "+1", "-1")}
    assert len(texts) == 3
