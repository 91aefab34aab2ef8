"""What a command asks an engine's process to do: plain data, sent as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final


@dataclass(frozen=True, slots=True)
class InspectJob:
    """Start an engine with dummy weights and report the sites of its graph.

    Attributes:
        model: a folder with a config.json, or a model's name on a hub.
        dtype: as vLLM takes it, such as "auto".
        sites: submodules or aliases to arm; empty for every one.
        dump: an existing folder for the graphs, None for no dump.
        apps: apps to deploy, whose sites and own ops are then in the graph.
        op_modules: modules that register the apps' own ops.
        eager: start it without compilation.
    """

    kind: ClassVar[str] = "inspect"
    model: str
    dtype: str
    sites: tuple[str, ...]
    dump: str | None
    apps: tuple[str, ...] = ()
    op_modules: tuple[str, ...] = ()
    eager: bool = False


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Answer one prompt greedily, once for each request, in one batch.

    Attributes:
        model: a folder with weights and a tokenizer.
        prompt: the text to continue.
        chat: whether the prompt is a user's message, put into the chat template.
        requests: the `eyesplice` object of each request, None to name nothing.
        max_tokens: tokens per request at most.
        vectors: folder of steering vectors; None runs vLLM without eyesplice.
    """

    kind: ClassVar[str] = "generate"
    model: str
    prompt: str
    chat: bool
    requests: tuple[dict[str, Any] | None, ...]
    max_tokens: int
    vectors: str | None


Job = InspectJob | GenerateJob

_KINDS: Final = {job.kind: job for job in (InspectJob, GenerateJob)}


def to_json(job: Job) -> str:
    """The job as text; `from_json` reads it back."""
    return json.dumps({"kind": job.kind, **asdict(job)})


def from_json(text: str) -> Job:
    """Read what `to_json` wrote."""
    fields = json.loads(text)
    job: type[InspectJob] | type[GenerateJob] = _KINDS[fields.pop("kind")]
    lists = {key: tuple(v) for key, v in fields.items() if isinstance(v, list)}
    return job(**{**fields, **lists})
