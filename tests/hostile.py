"""Hostile requests: well-formed ones with a few things changed for the worse.

A number makes a request, the same one every time. Nothing here knows what is refused.
"""

import copy
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

WRITES: Final[tuple[dict[str, Any], ...]] = (
    {"write": "steering_vector", "scale": 1.5, "when": "generated"},
    {"write": "ablate", "preserve_norm": True},
    {"write": "clamp", "lo": -1.0, "hi": 2.0, "when": "positions(2:-1)"},
    {"write": "one_sided", "offset": 0.5},
    {"write": "replace", "scale": 0.3, "when": "token_in([3, 4])"},
    {"write": "mask", "when": "after(token_in(5)) or not prompt"},
    {"write": "feature_clamp", "bias": 1, "threshold": 0.5, "value": 3},
    {"write": "affine", "function": "relu"},
    {"write": "router", "activate": {"3": [1]}, "deactivate": {"3": [0]}},
)
READS: Final[tuple[dict[str, Any], ...]] = (
    {"read": "probe", "bias": -0.5, "function": "sigmoid"},
    {"read": "dot", "over": "prompt", "reduce": "mean"},
    {"read": "cosine", "when": "last_token"},
    {"read": "norm"},
    {"read": "distance"},
    {"read": "tanh_cosine"},
    {"read": "sae", "function": "jump_relu", "threshold": 0.1},
    {"read": "capture", "when": "last_token"},
    {"read": "router", "top_k": 2},
)
_WEIGHED: Final = ("probe", "dot", "cosine", "distance", "tanh_cosine", "feature_clamp")
SUBMODULES: Final = ("residual.post", "residual.mid", "mlp.pre", "mlp.post",
                     "blocks.*.hook_resid_pre")  # fmt: skip
LAYERS: Final = (0, -1, [1, 2], "0-3", "all", [3], "2", [-1, 0])
GATES: Final = ("r0 >= 0", "0.5 < r0", "r0.mean > 1 and not r0.max < 3", "latch(r0 > 0)",
                "r0 < 9 or latch(r0.last < 1)", "'r0' <= 1")  # fmt: skip

_CONDITIONS: Final = ("all", "prompt", "last_token", "after(generated)", "positions(:3)",
                      "positions(-1)", "token_in(7)", "(all)")  # fmt: skip
_WORDS: Final = (
    *"()[]{}<>=!,.:;'\"\\#@$%&*+-/|^~`?\0\n\t",
    *("<=", ">=", "==", "!=", ":=", "**", "//", "->", "and", "or", "not", "if", "else"),
    *("lambda", "await", "yield", "in", "is", "for", "None", "True", "latch", "r0"),
    *("after", "all", "prompt", "generated", "last_token", "positions", "token_in"),
    *(".mean", ".max", "layer", "0", "1", "-3", "2:5", "1e999", "1j", "0x1f", "1_000"),
    *(
        "9" * 30,
        "9" * 5000,
        "é",
        "\uff41ll",
        "\ud800",
        "\u202e",
        "😀",
        "٣",
        "x.y",
        "r0(layer=1)",
    ),
    *("__import__('os').system('true')", "open('/etc/passwd').read()", "f'{r0}'"),
)
_LONG: Final = (
    "(" * 5000,
    "not " * 490 + "all",
    "all and " * 240 + "all",
    " or ".join(f"token_in({n})" for n in range(110)),
    " and ".join(f"r0 > {n}" for n in range(200)),
    "after(" * 40 + "all" + ")" * 40,
    "latch(" * 40 + "r0 > 0" + ")" * 40,
    "-" * 1500 + "1 < r0",
    "token_in(" + ", ".join(map(str, range(400))) + ")",
    "positions(" + "9" * 1900 + ":)",
    "r0" + ".mean" * 390 + " > 0",
    "r0" + "[0]" * 600 + " > 0",
    " or ".join(f"(r0 > {n} and r0.max < {n})" for n in range(9)),
    "x" * 100_000,
    " " * 1999 + "all",
    "😀" * 1999,
    "\ud800" * 50,
    "lambda: 1",
    "r0.mean > nan",
    "r0 >= 1 if r0 else 2",
    "r0[0:1] > 2",
    "norm(layer=9999) >= 0",
    "1 < r0 < 2",
    "x := 1",
    "all and " * 900 + "all",
    "not " * 3000 + "all",
    "positions(" + "9" * 400 + ":)",
    "token_in(" + ",".join(map(str, range(3000))) + ")",
)
_KEYS: Final = (
    *("writes", "reads", "apps", "hotwire", "write", "read", "vector", "weight"),
    *("layers", "submodule", "scale", "lo", "hi", "offset", "name", "u", "v", "bias"),
    *("function", "value", "threshold", "activate", "deactivate", "epsilon", "reduce"),
    *("over", "top_k", "preserve_norm", "stream_scores", "functions", "when", "gate"),
    *("scal", "__class__", "", "x" * 999, "\0", "é"),
)


_MAX_PLACES: Final = 20_000
"""Lists that hold themselves several times have no end of places."""


class _Odd:
    """An object that nobody asked for."""


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _cycle() -> Any:
    value: list[Any] = [1]
    value.append(value)
    return value


_VALUES: Final[tuple[Callable[[], Any], ...]] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 2**31,
    lambda: 2**63,
    lambda: -(2**63),
    lambda: 10**400,
    lambda: -(10**5000),
    lambda: float("nan"),
    lambda: float("-inf"),
    lambda: 1e308,
    lambda: -3.4e38,
    lambda: 5e-324,
    lambda: -0.0,
    lambda: 1e9,
    lambda: "",
    lambda: "x" * 300,
    lambda: "\0",
    lambda: "\ud800",
    lambda: "\u202e../../etc/passwd",
    lambda: "é😀" * 100,
    lambda: b"bytes",
    list,
    dict,
    lambda: [[]],
    lambda: {"a": {"b": [1, None]}},
    lambda: {1: 2},
    lambda: {"functions": {"0": {"scale": 1e40}}},
    lambda: 2**70,
    lambda: 1e-320,
    lambda: "off",
    lambda: "a" * 100_000,
    lambda: "../../etc/passwd",
    lambda: object(),
    lambda: _nested(40),
    lambda: _nested(400),
    lambda: _nested(20_000),
    lambda: _cycle(),
    lambda: list(range(5000)),
    lambda: list(range(-4, 4)) * 400,
    lambda: {f"key{n}": n for n in range(3000)},
    lambda: range(10**12),
    lambda: (1, 2),
    lambda: {1, 2},
    lambda: _Odd(),
    lambda: _Odd,
    lambda: print,
    lambda: torch.ones(3),
    lambda: "attention.heads",
    lambda: "router.logits",
    lambda: "blocks.1.hook_resid_post",
    lambda: "3-1",
    lambda: "0-99999999999",
    lambda: "9" * 5000,
    lambda: "blocks.9999999999999999.hook_resid_post",
    lambda: [2**31],
    lambda: [0.0],
    lambda: ["all", "all"],
)


def soup(rng: random.Random) -> str:
    """A condition or a gate that mostly is none."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(_LONG)
    if kind < 0.5:
        return rng.choice((" and ", " or ", " and not ")).join(
            rng.choices((*GATES, *_CONDITIONS), k=rng.randint(1, 4))
        )
    joint = rng.choice(("", " "))
    return joint.join(rng.choices(_WORDS, k=rng.randint(1, 12)))


@dataclass(frozen=True)
class Names:
    """What requests can name: tensors of one row and of several, and apps."""

    vectors: Sequence[str]
    rows: Sequence[str]
    apps: Sequence[str] = ()
    routed: bool = False


def request(number: int, names: Names) -> Any:
    """The `extra_args` of the request of a number."""
    rng = random.Random(f"request {number}")
    spec = copy.deepcopy(_well_formed(rng, names))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        spec = _changed(rng, spec)
    if rng.random() < 0.25:
        spec = _as_text(rng, spec)
    key = "hotwire" if rng.random() < 0.05 else "eyesplice"
    return {key: spec}


def _well_formed(rng: random.Random, names: Names) -> Any:
    if rng.random() < 0.05:
        item = {"id": rng.choice(names.vectors), "layer": 1, "scale": 1.5}
        return {"hotwire": rng.choice((item, [item, item], json.dumps(item)))}
    spec: dict[str, Any] = {"reads": [], "writes": []}
    for i in range(rng.randint(0, 2)):
        spec["reads"].append({**_entry(rng, READS, names), "name": f"r{i}"})
    for _ in range(rng.randint(0, 2)):
        spec["writes"].append(_entry(rng, WRITES, names))
    if spec["reads"] and spec["writes"] and rng.random() < 0.5:
        read = {
            "read": "norm",
            "layers": [0],
            "submodule": "residual.pre",
            "name": "r0",
        }
        spec["reads"][0] = read
        place = {"layers": [2, 3], "submodule": "residual.post"}
        spec["writes"][0] |= place | {"gate": rng.choice(GATES)}
    if names.apps and rng.random() < 0.3:
        overrides = rng.choice(({}, {"scale": 2.0}, {"functions": {"0": {"bias": 1}}}))
        spec["apps"] = {rng.choice(names.apps): overrides}
    return spec


def _entry(
    rng: random.Random, kinds: Sequence[dict[str, Any]], names: Names
) -> dict[str, Any]:
    entry = dict(rng.choice(kinds if names.routed else kinds[:-1]))
    kernel = entry.get("read", entry.get("write"))
    if kernel == "router":
        return entry | ({"layers": [1]} if "read" in entry else {})
    if kernel == "affine":
        entry |= {"u": names.rows[0], "v": names.rows[1]}
    elif "write" in entry:
        entry["vector"] = rng.choice(names.vectors)
    if kernel == "sae":
        entry["weight"] = rng.choice(names.rows)
    elif kernel in _WEIGHED:
        entry["weight"] = rng.choice(names.vectors)
    entry["layers"] = rng.choice(LAYERS)
    if rng.random() < 0.4:
        entry["submodule"] = rng.choice(SUBMODULES)
    return entry


def _changed(rng: random.Random, spec: Any) -> Any:
    """The request with one change, at any place in it."""
    places = list(itertools.islice(_places(spec), _MAX_PLACES))
    if not places or rng.random() < 0.03:
        return rng.choice(_VALUES)()
    holder, key = rng.choice(places)
    kind = rng.random()
    if key in ("when", "gate") and kind < 0.7:
        holder[key] = soup(rng)
    elif kind < 0.5:
        holder[key] = rng.choice(_VALUES)()
    elif kind < 0.6:
        del holder[key]
    elif kind < 0.75 and isinstance(holder, list):
        holder[:] = holder * rng.choice((2, 30, 300))
    elif kind < 0.9 and isinstance(holder, dict):
        holder[rng.choice(_KEYS)] = rng.choice((soup(rng), rng.choice(_VALUES)()))
    else:
        other, name = rng.choice(places)
        holder[key] = other[name] if name in _keys(other) else None
    return spec


def _places(spec: Any, depth: int = 0) -> Any:
    if depth > 5 or not isinstance(spec, list | dict) or len(spec) > 600:
        return
    for key in _keys(spec):
        yield spec, key
        yield from _places(spec[key], depth + 1)


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _as_text(rng: random.Random, spec: Any) -> Any:
    """JSON text of the request, at times a damaged one; itself where it has none."""
    if len(list(itertools.islice(_places(spec), _MAX_PLACES))) == _MAX_PLACES:
        return spec
    try:
        text = json.dumps(spec)
    except (TypeError, ValueError, RecursionError):
        return spec
    if rng.random() < 0.5 and len(text) < 10_000:
        place = rng.randrange(len(text) + 1)
        noise = rng.choice(
            (*'{}[]",:', "NaN", "\\ud800", "\ud800", "1e999", "\ufeff", "")
        )
        text = text[:place] + noise + text[place + rng.randint(0, 3) :]
    return text
