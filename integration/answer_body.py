"""The answer to a request, as its client gets it: docs/seeing.md describes the object."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from eyesplice.fx_passes.program import FunctionInfo, Program
from eyesplice.integration.raw_answers import RawAnswer
from eyesplice.integration.router import prompt_length
from eyesplice.ops.layout import Reduce, Scope

_NUMPY_DTYPES: Final = {"float32": np.float32, "float16": np.float16}
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_PER_TOKEN: Final = ("values", "positions")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asked for.

    Attributes:
        program: what it does; None when it is served without effect.
        vectors: digests of the registered vectors that it names itself.
        apps: the apps that take part.
        stream_scores: whether its client wants scores as they come.
        error: why it is served without effect.
        prompt_len: tokens of its prompt.
    """

    program: Program | None
    vectors: Mapping[str, str]
    apps: tuple[str, ...] = ()
    stream_scores: bool = False
    error: str | None = None
    prompt_len: int = 0

    @property
    def functions(self) -> tuple[FunctionInfo, ...]:
        """The functions of the program."""
        return self.program.functions if self.program is not None else ()

    def for_prompt(self, request: Any) -> "Asked":
        """The same, with the prompt of one of vLLM's requests."""
        return replace(self, prompt_len=prompt_length(request))


def body(asked: Asked, raw: RawAnswer | None, since: int = -1) -> dict[str, Any]:
    """The whole answer to a request that has ended.

    Args:
        asked: what it asked for.
        raw: what it found out; None if nothing arrived from the engine.
        since: leave out scores of tokens up to this position.
    """
    found = raw if raw is not None else RawAnswer()
    answer: dict[str, Any] = {
        "apps": list(asked.apps),
        "vectors": dict(asked.vectors),
        "writes": list(_writes(asked, found)),
        "scores": _scores(asked, found, since, reduced=True),
        "gates": dict(_gates(asked, found)),
        "captures": dict(_captures(asked, found)),
    }
    experts = _experts(asked, found)
    if experts:
        answer["experts"] = experts
    errors = [asked.error, *_errors(asked, raw)]
    if any(errors):
        answer["error"] = "; ".join(error for error in errors if error)
    return answer


def new_scores(asked: Asked, raw: RawAnswer, since: int) -> dict[str, Any] | None:
    """The answer of a request that goes on: scores after position `since`, if any."""
    scores = _scores(asked, raw, since, reduced=False)
    return {"scores": scores} if scores else None


def joined(
    earlier: dict[str, Any] | None, later: dict[str, Any] | None
) -> dict[str, Any] | None:
    """One answer for two outputs in a row: scores after scores, the rest of the later."""
    if earlier is None or later is None:
        return later or earlier
    scores = dict(earlier.get("scores") or {})
    for name, score in (later.get("scores") or {}).items():
        scores[name] = _joined_scores(scores[name], score) if name in scores else score
    return {**earlier, **later, "scores": scores}


def _joined_scores(earlier: Any, later: Any) -> Any:
    if isinstance(later, list):
        return [_joined_scores(*both) for both in zip(earlier, later, strict=True)]
    return {
        key: [*earlier[key], *value] if key in _PER_TOKEN else value
        for key, value in later.items()
    }


def _errors(asked: Asked, raw: RawAnswer | None) -> Iterator[str | None]:
    if asked.program is None:
        return
    if raw is None:
        yield "the request ended before the engine reported anything of it"
        return
    yield raw.error
    if raw.lost:
        yield (
            f"{raw.lost} captured rows found no room and are missing: capture at fewer "
            "tokens or sites, or start the engine with more capture_rows"
        )


def _count(counts: list[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def _writes(asked: Asked, raw: RawAnswer) -> Iterator[dict[str, Any]]:
    for index, function in enumerate(asked.functions):
        if function.kind == "write":
            yield {
                "function": function.name,
                "layers": list(function.layers),
                "submodule": function.submodule,
                "tokens": _count(raw.counts[0], index),
            }


def _gates(asked: Asked, raw: RawAnswer) -> Iterator[tuple[str, dict[str, int]]]:
    acted, evaluated = raw.counts
    for index, function in enumerate(asked.functions):
        if function.gated:
            yield (
                function.name,
                {"passed": _count(acted, index), "evaluated": _count(evaluated, index)},
            )


def _scores(
    asked: Asked, raw: RawAnswer, since: int, *, reduced: bool
) -> dict[str, Any]:
    """Scores by function: per token after `since`, or reduced over all of them."""
    if asked.program is None or not asked.program.scores:
        return {}
    if not raw.num_scores:
        # Nothing has arrived: the request was aborted, or could not run as asked.
        raw = RawAnswer(num_scores=len(asked.program.scores))
    positions, scores = raw.score_rows()
    found: dict[str, Any] = {}
    for index, function in enumerate(asked.functions):
        slots = _slots(asked.program, index)
        if not slots or (function.reduce and not reduced):
            continue
        new = positions > (-1 if function.reduce else since)
        parts = [
            _score(function, layer, positions[new], scores[new][:, columns], asked)
            for layer, columns in slots.items()
        ]
        if reduced or any(part["positions"] for part in parts):
            found[function.name] = parts if len(parts) > 1 else parts[0]
    return found


def _slots(program: Program, function: int) -> dict[int, list[int]]:
    """The score slots of a read at each of its layers, in the order of features."""
    slots: dict[int, list[int]] = {}
    for slot, score in enumerate(program.scores):
        if score.function == function:
            slots.setdefault(score.layer, []).append(slot)
    return slots


def _score(
    function: FunctionInfo,
    layer: int,
    positions: NDArray[np.int32],
    scores: NDArray[np.float32],
    asked: Asked,
) -> dict[str, Any]:
    """A read's scores at one layer: `[tokens, features]` without the unread tokens."""
    read = ~np.isnan(scores).all(axis=1)
    positions, rows = positions[read], scores[read].astype(np.float64)
    if function.reduce:
        within = _within(function.over, positions, asked.prompt_len)
        positions, rows = _reduced(function.reduce, positions[within], rows[within])
    rows = rows.clip(-_FLOAT32_MAX, _FLOAT32_MAX)
    values = rows.tolist() if function.kernel == "sae" else rows[:, 0].tolist()
    return {"layer": layer, "values": values, "positions": positions.tolist()}


def _within(
    scope: Scope, positions: NDArray[np.int32], prompt_len: int
) -> NDArray[np.bool_]:
    match scope:
        case Scope.PROMPT:
            return positions < prompt_len
        case Scope.GENERATED:
            return positions >= prompt_len
        case _:
            return np.ones(len(positions), dtype=bool)


def _reduced(
    reduce: Reduce, positions: NDArray[np.int32], rows: NDArray[np.float64]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The last position and one row, neither if there are none."""
    if not len(rows):
        return positions, rows
    match reduce:
        case Reduce.MEAN:
            row = rows.mean(axis=0)
        case Reduce.MAX:
            row = rows.max(axis=0)
        case _:
            row = rows[-1]
    return positions[-1:], row[None]


def _captures(asked: Asked, raw: RawAnswer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Captured rows by hook point; two functions' rows of one are put together."""
    if asked.program is None:
        return
    by_site: dict[str, list[int]] = {}
    for index, capture in enumerate(asked.program.captures):
        if asked.functions[capture.function].kernel != "router":
            name = capture.site.alias or str(capture.site)
            by_site.setdefault(name, []).append(index)
    for name, indices in by_site.items():
        positions, rows = raw.captured(indices)
        submodule = asked.program.captures[indices[0]].site.submodule
        yield (
            name,
            {
                "shape": [len(rows), raw.widths.get(submodule, 0)],
                "dtype": raw.dtype,
                "positions": positions.tolist(),
                "data": base64.b64encode(np.ascontiguousarray(rows).data).decode(),
            },
        )


def _experts(asked: Asked, raw: RawAnswer) -> dict[str, Any]:
    """The experts that router reads saw chosen, by function."""
    found: dict[str, list[dict[str, Any]]] = {}
    for index, capture in enumerate(asked.program.captures if asked.program else ()):
        function = asked.functions[capture.function]
        if function.kernel != "router":
            continue
        positions, rows = raw.captured([index])
        logits = _floats(rows, raw.dtype)
        best = np.argsort(-logits, axis=1, kind="stable")[:, : function.top_k or None]
        part = {
            "layer": capture.site.layer,
            "experts": best.tolist(),
            "positions": positions.tolist(),
        }
        found.setdefault(function.name, []).append(part)
    return {
        name: parts if len(parts) > 1 else parts[0] for name, parts in found.items()
    }


def _floats(rows: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Rows of bytes as numbers; numpy has no bfloat16, the upper half of a float32."""
    if dtype == "bfloat16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(_NUMPY_DTYPES.get(dtype, np.float32)).astype(np.float32)


def first_answer(outputs: Iterable[Any], key: str) -> dict[str, Any] | None:
    """The first answer of several completions, None if none has one."""
    answers = (getattr(output, key, None) for output in outputs)
    return next((answer for answer in answers if answer is not None), None)
