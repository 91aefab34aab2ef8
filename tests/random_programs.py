"""Random well-formed programs, each as a request says it and as hooks do it.

A number makes a program, the same one every time. Every kernel, submodule, condition and
gate can occur that the language has and the hooks can judge; values stay moderate, and
thresholds are taken from what the plain model gives, so that gates open and close.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from tests import functions as f
from tests.functions import Fn, Run
from tests.oracle import SUBMODULES
from tests.random_conditions import NAMED, Meaning, Text, positions
from tests.random_functions import LISTED, Margins, read_row, write_edit
from tests.tiny_models import NUM_LAYERS

REDUCTIONS: Final = ("mean", "max", "last")
SCOPES: Final = ("request", "request", "prompt", "generated")
HOOKS: Final = {
    "residual.pre": "hook_resid_pre",
    "attention.pre": "ln1.hook_normalized",
    "attention.post": "hook_attn_out",
    "residual.mid": "hook_resid_mid",
    "mlp.pre": "ln2.hook_normalized",
    "mlp.post": "hook_mlp_out",
    "residual.post": "hook_resid_post",
}
"""TransformerLens's name of each submodule."""

_MAX_BITS: Final = 30
"""Conditions and parts of gates of one program; `select` has 32 bits."""


@dataclass
class Draft:
    """One function on its way."""

    entry: dict[str, Any]
    name: str
    submodule: str
    layers: list[int]
    row: f.ReadRow | None = None
    edit: Any = None
    features: int | None = None
    when: Meaning | None = None
    gate: Meaning | None = None

    @property
    def scored(self) -> bool:
        """Whether gates can compare it."""
        return self.row is not None


@dataclass(frozen=True)
class Score:
    """What a gate can compare: a read's score at a layer."""

    draft: Draft
    layer: int
    feature: int | None

    @property
    def place(self) -> tuple[int, int]:
        """Its site's place in the forward pass."""
        return self.layer, SUBMODULES.index(self.draft.submodule)

    @property
    def launch(self) -> int:
        """The boundary that makes it, numbered in the order of the forward pass."""
        return launch_of(self.place)

    @property
    def over(self) -> str:
        """The tokens of its reductions."""
        return self.draft.entry.get("over", "request")

    def values(self, run: Run) -> Tensor:
        """`[tokens]`."""
        found = run.scores[self.draft.name, self.layer]
        return found if self.feature is None else found[:, self.feature]


def launch_of(place: tuple[int, int]) -> int:
    """mlp.post and residual.post share a boundary with the next layer's first sites."""
    layer, submodule = place
    if submodule < SUBMODULES.index("attention.post"):
        return 2 * layer
    return 2 * layer + (1 if submodule < SUBMODULES.index("mlp.post") else 2)


@dataclass
class Program:
    """A program.

    Attributes:
        spec: the value of the key `eyesplice`.
        drafts: reads, then writes.
        ids: the tokens that it is judged on, set before its hooks run.
        margins: how far the compared values were from their thresholds.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)
    ids: Sequence[int] = ()
    margins: Margins = field(default_factory=Margins)

    def functions(self) -> list[Fn]:
        """The functions for `ids`."""
        return [_function(draft) for draft in self.drafts]


def _function(draft: Draft) -> Fn:
    when = draft.when
    mask = {} if when is None else {"when": lambda p, n: when(Run(p, n))}
    return Fn(draft.name, draft.submodule, draft.layers, edit=draft.edit,
              read=draft.row, gate=draft.gate, **mask)  # fmt: skip


def make(number: int, plain: Mapping[tuple[str, int], Tensor]) -> Program:
    """The program of a number.

    Args:
        number: any.
        plain: values of the plain model by submodule and layer, `[tokens, width]`.
    """
    return _Maker(random.Random(number), plain).program()


class _Maker:
    def __init__(
        self, rng: random.Random, plain: Mapping[tuple[str, int], Tensor]
    ) -> None:
        self.rng = rng
        self.plain = plain
        self.made = Program()
        self.bits = _MAX_BITS

    def program(self) -> Program:
        reads = [self._read(i) for i in range(self.rng.choice((0, 1, 1, 2, 3)))]
        least = 0 if reads else 1
        writes = [self._write(i) for i in range(self.rng.randint(least, 3))]
        self.made.drafts = [*reads, *writes]
        for i, draft in enumerate(self.made.drafts):
            if self.rng.random() < 0.5 and self.bits > 8:
                chosen = self._tree(2, self._condition_leaf, self._after)
                draft.entry["when"], draft.when = chosen.text, chosen.meaning
            scores = [s for r in reads[:i] if r.scored for s in self._scores(r)]
            self._gate(draft, scores)
        keys = {"reads": reads, "writes": writes}
        self.made.spec = {
            key: [self._spelt(draft) for draft in found] for key, found in keys.items()
        }
        return self.made

    def _spelt(self, draft: Draft) -> dict[str, Any]:
        """The entry, its place in one of the ways in which it can be written."""
        entry, layers = dict(draft.entry), draft.layers
        ways: list[Any] = [layers, layers, [n - NUM_LAYERS for n in layers]]
        if len(layers) == 1:
            ways.append(layers[0])
        if len(layers) == layers[-1] - layers[0] + 1:
            ways.append(f"{layers[0]}-{layers[-1]}")
        if len(layers) == NUM_LAYERS:
            ways.append("all")
        entry["layers"] = self.rng.choice(ways)
        if self.rng.random() < 0.2:
            entry["submodule"] = f"blocks.*.{HOOKS[draft.submodule]}"
        return entry

    def _place(self, most: int) -> dict[str, Any]:
        count = self.rng.choice((1, 1, 1, 2, 2, NUM_LAYERS)[:most])
        layers = sorted(self.rng.sample(range(NUM_LAYERS), count))
        return {"layers": layers, "submodule": self.rng.choice(SUBMODULES)}

    def _drafted(self, kind: str, i: int, entry: dict[str, Any], **more: Any) -> Draft:
        name = f"{kind}s/{i}"
        if self.rng.random() < 0.7:
            name = entry["name"] = f"{kind[0]}{i}"
        place = {key: entry[key] for key in ("submodule", "layers")}
        return Draft(entry=entry, name=name, **place, **more)

    def _read(self, i: int) -> Draft:
        entry = self._place(most=5)
        if self.rng.random() < 0.15:
            return self._drafted("read", i, {"read": "capture", **entry})
        if self.rng.random() < 0.4:
            entry["over"] = self.rng.choice(SCOPES)
        if self.rng.random() < 0.2:
            entry["reduce"] = self.rng.choice(REDUCTIONS)
        own, row, features = read_row(self.rng, entry["layers"], self.made.margins)
        return self._drafted("read", i, entry | own, row=row, features=features)

    def _write(self, i: int) -> Draft:
        entry = self._place(most=6)
        own, edit = write_edit(self.rng, entry["layers"], self.made.margins)
        return self._drafted("write", i, entry | own, edit=edit)

    def _scores(self, draft: Draft) -> list[Score]:
        features = [None] if draft.features is None else range(draft.features)
        return [Score(draft, layer, i) for layer in draft.layers for i in features]

    # Trees of conditions and gates.

    def _tree(
        self,
        depth: int,
        leaf: Callable[[int], Text],
        once: Callable[[Text], Text] | None,
        nested: int = 0,
        limit: Callable[[int], bool] = lambda nested: True,
    ) -> Text:
        """A random combination; `once` wraps what one more nesting may hold."""
        self.bits -= 1
        kinds = ["leaf", "leaf", "and", "or", "not", *(["once"] if once else [])]
        kind = self.rng.choice(kinds) if depth and self.bits > 8 else "leaf"
        if kind == "once" and nested < 2 and limit(nested + 1):
            assert once is not None
            return once(self._tree(depth - 1, leaf, once, nested + 1, limit))
        if kind in ("leaf", "once"):
            return leaf(nested)
        count = 1 if kind == "not" else 2
        parts = [self._tree(depth - 1, leaf, once, nested, limit) for _ in range(count)]
        meanings = [part.meaning for part in parts]
        if kind == "not":
            return Text(f"not {parts[0].within(3)}", 3, f.negated(*meanings))
        binds, join = (2, f.both) if kind == "and" else (1, f.either)
        shown = f" {kind} ".join(part.within(binds) for part in parts)
        return Text(shown, binds, join(*meanings))

    def _condition_leaf(self, nested: int) -> Text:
        name = self.rng.choice((*NAMED, "positions", "positions", "ids", "ids"))
        if name in NAMED:
            return Text(name, 4, NAMED[name])
        if name == "positions":
            return positions(self.rng)
        ids = self.rng.sample(LISTED, self.rng.randint(1, 3))
        shown = ", ".join(map(str, ids))
        shown = f"[{shown}]" if self.rng.random() < 0.5 else shown
        chosen, made = torch.tensor(ids), self.made
        return Text(
            f"token_in({shown})",
            4,
            lambda run: torch.isin(torch.tensor(list(made.ids)), chosen)[run.positions],
        )

    def _after(self, part: Text) -> Text:
        def meaning(run: Run) -> Tensor:
            inside = f.after(lambda p, n: part.meaning(Run(p, n)))
            return inside(run.positions, run.prompt_len)

        return Text(f"after({part.text})", 4, meaning)

    def _gate(self, draft: Draft, scores: Sequence[Score]) -> None:
        first = (min(draft.layers), SUBMODULES.index(draft.submodule))

        def known(nested: int) -> list[tuple[Score, str | None]]:
            """Scores and reductions that are known there, inside so many latches."""
            found: list[tuple[Score, str | None]] = []
            for score in scores:
                late = score.launch + nested
                if late <= launch_of(first) if nested else score.place <= first:
                    found.append((score, None))
                if late < launch_of(first):
                    found += [(score, how) for how in REDUCTIONS]
            return found

        if not known(0) or self.rng.random() < 0.25 or self.bits < 9:
            return
        self.bits -= 1
        gate = self._tree(
            2,
            lambda nested: self._compare(*self.rng.choice(known(nested))),
            lambda part: Text(f"latch({part.text})", 4, f.latch(part.meaning)),
            limit=lambda nested: bool(known(nested)),
        )
        draft.entry["gate"], draft.gate = gate.text, gate.meaning

    def _compare(self, score: Score, how: str | None) -> Text:
        rng, draft, margins = self.rng, score.draft, self.made.margins
        assert draft.row is not None
        usual = draft.row(self.plain[draft.submodule, score.layer])
        margins.clear()
        usual = usual if score.feature is None else usual[:, score.feature]
        t = round(float(usual.quantile(rng.uniform(0.2, 0.8))) + rng.gauss(0, 0.1), 3)
        name = self._reference(score) + ("" if how is None else f".{how}")
        sign = rng.choice(tuple(f.COMPARISONS))
        text = f"{name} {sign} {t!r}"
        if rng.random() < 0.25:
            flipped = sign.translate(str.maketrans("<>", "><"))
            text = f"{t!r} {flipped} {name}"

        def meaning(run: Run) -> Tensor:
            values = score.values(run)
            if how is not None:
                seen = Run(run.positions, run.prompt_len, {("", 0): values})
                values = f.reduction(seen, "", 0, how, score.over)
            margins.note(values, t)
            return f.COMPARISONS[sign](t)(values) & ~values.isnan()

        return Text(text, 3, meaning)

    def _reference(self, score: Score) -> str:
        """How the gate names the score."""
        draft = score.draft
        kernel = draft.entry["read"]
        alike = [
            d
            for d in self.made.drafts
            if d.entry.get("read") == kernel and score.layer in d.layers
        ]
        name = draft.name if draft.name.isidentifier() else f'"{draft.name}"'
        layer = f"(layer={score.layer})"
        if len(alike) == 1 and self.rng.random() < 0.3:
            name = kernel + layer
        elif len(draft.layers) > 1 or self.rng.random() < 0.2:
            name += layer
        return name if score.feature is None else f"{name}[{score.feature}]"
