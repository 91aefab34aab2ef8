"""Thousands of hostile requests and apps: each is served or refused, never a crash."""

import contextlib
import copy
import json
import random
import time
from typing import Any

import pytest

from eyesplice import SpecError
from eyesplice.fx_passes.app_files import app_from_json
from eyesplice.fx_passes.lowering import lower
from eyesplice.fx_passes.request import parse_request
from tests.request_world import context

SECONDS = 2.0
"""What the slowest refusal may take, far above what any does."""


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


POISON: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**70),
    10**400,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    1e-320,
    "",
    "off",
    "\x00",
    "\ud800",
    "é" * 300,
    "a" * 100_000,
    "../../etc/passwd",
    "__import__('os').system('true')",
    "lambda: 1",
    "p >= 0",
    "p.mean > nan",
    "latch(" * 50,
    "(" * 5000,
    "not " * 3000 + "all",
    "positions(" + "9" * 400 + ":)",
    "token_in(" + ",".join(map(str, range(3000))) + ")",
    "after(after(after(token_in(1))))",
    "all and " * 900 + "all",
    "p >= 1 if p else 2",
    "p[0:1] > 2",
    "probe(layer=9999) >= 0",
    "1 < p < 2",
    "x := 1",
    [],
    {},
    [[]],
    {"a": {"b": {}}},
    list(range(5000)),
    _deep(400),
    {str(i): i for i in range(3000)},
    b"bytes",
    {1: 2},
    object(),
]

REQUESTS: list[Any] = [
    {"writes": [{"vector": "a", "layers": [1], "scale": 2.0, "when": "prompt"}]},
    {
        "reads": [{"read": "probe", "name": "p", "weight": "a", "layers": [0]}],
        "writes": [
            {"write": "ablate", "vector": "a", "layers": [2, 3], "gate": "p >= 0.5"},
            {"write": "clamp", "vector": "a", "layers": "all", "lo": -1, "hi": 1},
        ],
    },
    {"reads": [{"read": "capture", "layers": "1-2", "submodule": "residual.mid"}]},
    {
        "writes": [
            {"write": "mask", "vector": "a", "layers": [0], "preserve_norm": True}
        ]
    },
    {"apps": {"nobody": {}}, "stream_scores": True},
    {"hotwire": {"id": "a", "layer": 1, "scale": 1.0, "decode_only": True}},
]

KEYS = [
    "writes", "reads", "apps", "hotwire", "write", "read", "vector", "weight", "layers",
    "submodule", "scale", "when", "gate", "lo", "hi", "offset", "name", "u", "v", "bias",
    "function", "value", "threshold", "activate", "deactivate", "epsilon", "reduce",
    "over", "top_k", "preserve_norm", "stream_scores", "__class__", "functions",
]  # fmt: skip

APPS: list[Any] = [
    {
        "name": "guarded",
        "functions": [
            {"read": "probe", "name": "g", "weight": "w", "layers": [0]},
            {
                "write": "steering_vector",
                "vector": "w",
                "layers": [1],
                "when": "token_in(set)",
                "gate": "g >= 0",
            },
        ],
        "token_sets": {"set": [1, 2]},
        "tensors": {"w": {"dtype": "float32", "shape": [2], "data": "AAAAAAAAAAA="}},
    }
]
POISON_TENSORS: list[Any] = [
    {"dtype": "float32", "shape": [2**40], "data": ""},
    {"dtype": "object", "shape": [1], "data": "AAAA"},
    {"dtype": "float32", "shape": [-1], "data": "AAAA"},
    {"dtype": "float32", "shape": [2], "data": "not base64 !"},
    {"dtype": "float32", "shape": [1], "data": "AADAfw=="},
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        found += _places(item, (*path, key))
    return found


def _mutated(rng: random.Random, template: Any, poison: list[Any]) -> Any:
    """The template with one to three places of it poisoned."""
    places, whole = _places(template), copy.deepcopy(template)
    for _ in range(rng.randint(1, 3)):
        path, bad = rng.choice(places), rng.choice(poison)
        if not path:
            if rng.random() < 0.2:
                return bad
            continue
        # An earlier mutation may have taken the place away.
        with contextlib.suppress(LookupError, TypeError, AttributeError):
            parent = whole
            for key in path[:-1]:
                parent = parent[key]
            match rng.randrange(4):
                case 0 if isinstance(parent, dict):
                    parent[rng.choice(KEYS)] = bad
                case 1 if isinstance(parent, list):
                    parent.extend([copy.deepcopy(parent[-1])] * rng.choice([1, 300]))
                case 2:
                    del parent[path[-1]]
                case _:
                    parent[path[-1]] = bad
    return whole


@pytest.mark.parametrize("part", range(4))
def test_hostile_requests(part: int):
    rng, offered = random.Random(part), context()
    refused = 0
    for number in range(500):
        spec = _mutated(rng, rng.choice(REQUESTS), POISON)
        if number % 3 == 0:
            spec = json.dumps(spec, default=str)
        started = time.monotonic()
        try:
            request = parse_request({"eyesplice": spec}, offered)
            if request is not None:
                lower(request, offered)
        except SpecError as error:
            refused += 1
            assert len(str(error)) < 5000
        assert time.monotonic() - started < SECONDS, spec
    assert 250 < refused <= 500


def test_hostile_apps():
    rng, refused = random.Random(9), 0
    for _ in range(1000):
        app = _mutated(rng, APPS[0], POISON + POISON_TENSORS)
        started = time.monotonic()
        try:
            app_from_json(json.dumps(app, default=str).encode(errors="surrogatepass"))
        except SpecError:
            refused += 1
        assert time.monotonic() - started < SECONDS, app
    assert 500 < refused <= 1000
