"""Scores of many requests, gathered over steps: nothing lost, nothing out of order."""

import random

import numpy as np
import pytest

from eyesplice.integration.raw_answers import StepScores
from eyesplice.integration.score_window import ScoreWindow


class World:
    """A window, what it handed on, and what was put in, as plain lists."""

    def __init__(self) -> None:
        self.got: dict[str, list] = {}
        self.put: dict[str, list] = {}
        self.window = ScoreWindow(self._take)

    def _take(self, request, positions, rows):
        assert positions.dtype == np.int32 and rows.dtype == np.float32
        found = zip(positions.tolist(), rows.tolist(), strict=True)
        self.got.setdefault(request, []).extend(found)

    def step(self, serial, spans, columns, slots, chance):
        rows, first_row = [], []
        width = max(columns[request] for request in spans)
        for request, (start, stop) in spans.items():
            # Rows of requests without scores lie between those of others.
            rows += [[np.nan] * width] * chance.randint(0, 2)
            first_row.append(len(rows))
            for position in range(start, stop):
                row = [chance.random() for _ in range(columns[request])]
                row = np.float32(row).tolist()
                rows.append(row + [np.nan] * (width - len(row)))
                self.put.setdefault(request, []).append((position, row))
        self.window.add(
            serial,
            StepScores(
                requests=list(spans),
                slots=np.array([slots[request] for request in spans]),
                columns=np.array([columns[request] for request in spans]),
                first_position=np.array([start for start, _ in spans.values()]),
                first_row=np.array(first_row),
                lengths=np.array([stop - start for start, stop in spans.values()]),
                rows=np.array(rows, dtype=np.float32).reshape(-1, width),
            ),
        )


@pytest.mark.parametrize("seed", range(8))
def test_every_row_arrives_once_and_in_order(seed):
    chance, world = random.Random(seed), World()
    free, slots, columns, position = list(range(1, 7)), {}, {}, {}
    serial = born = 0
    for _ in range(400):
        if free and (not slots or chance.random() < 0.1):
            name = f"r{born}"
            born, serial = born + 1, serial + 1
            slots[name] = free.pop(chance.randrange(len(free)))
            columns[name], position[name] = chance.randint(1, 4), 0
        if len(slots) > 1 and chance.random() < 0.05:
            # It ends: what waits is asked for, then dropped. Its slot is free again.
            name, serial = chance.choice(sorted(slots)), serial + 1
            world.window.flush(name)
            world.window.forget(name)
            free.append(slots.pop(name))
            assert world.got.get(name) == world.put.get(name)
        if len(slots) > 1 and chance.random() < 0.05:
            # It is preempted, and starts again in another slot, perhaps later.
            name, serial = chance.choice(sorted(slots)), serial + 1
            free.append(slots[name])
            slots[name], position[name] = free.pop(0), 0
        spans = {}
        for name in slots:
            length = chance.choice([1, 1, 1, 1, 1, 1, 0, 5])
            spans[name] = (position[name], position[name] + length)
            position[name] += length
        world.step(serial, spans, columns, slots, chance)
    for name in slots:
        world.window.flush(name)
    assert born > 10
    assert world.got == world.put


def test_what_was_dropped_is_not_handed_on():
    chance, world = random.Random(0), World()
    for position in range(3):
        spans = {"a": (position, position + 1)}
        world.step(0, spans, {"a": 2}, {"a": 4}, chance)
    world.window.forget("a")
    # Steps of the same batch that were under way when it ended.
    for position in range(3, 100):
        spans = {"a": (position, position + 1)}
        world.step(0, spans, {"a": 2}, {"a": 4}, chance)
    world.step(1, {"b": (0, 1)}, {"b": 1}, {"b": 4}, chance)
    world.window.flush("b")
    assert world.got == {"b": world.put["b"]}
