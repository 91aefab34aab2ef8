"""Requests that come, go and lose their places at random, against what each one alone
should find out: through router, ops, results and the engine core's part of the answers."""

import numpy as np
import pytest
import torch

from eyesplice.integration.raw_answers import RawAnswer
from tests.random_host import Engine, Request
from tests.random_host_programs import WHEN, score, value


def check(request: Request, lost_allowed: bool) -> None:
    raw, kind, last = request.raw, request.kind, request.answered
    if kind is None:
        assert raw == RawAnswer()
        return
    if request.refused:
        assert raw.error == "refused"
        assert not raw.positions and not raw.captures
        return
    assert raw.error is None
    wanted = range(request.start, last + 1)
    holds = [p for p in wanted if WHEN[kind.when](p, request.prompt_len)]
    if kind.scores:
        positions, rows = raw.score_rows()
        read = ~np.isnan(rows[:, 0])
        assert positions[read].tolist() == holds
        expected = [score(0, request.token(p), p) for p in holds]
        for column in rows[read].T:
            np.testing.assert_allclose(column, expected, rtol=1e-5, atol=1e-5)
        assert rows.shape[1] == kind.scores
    else:
        assert not raw.positions
    for index in range(kind.captures):
        positions, data = raw.captured([index])
        if not lost_allowed:
            assert positions.tolist() == holds
            assert raw.lost == 0
        assert set(positions.tolist()) <= set(holds)
        if len(positions):
            found = data.view(np.float32)
            rows = [value(index % 2, request.token(p), p) for p in positions.tolist()]
            np.testing.assert_array_equal(found, torch.stack(rows).numpy())
    missing = sum(len(holds) - len(raw.captured([i])[0]) for i in range(kind.captures))
    # A row that was lost before a preemption may have come again.
    assert missing <= raw.lost
    if kind.adds:
        assert raw.counts[0][kind.scores + kind.captures] == kind.acted(request, last)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("capture_rows", [512, 5])
@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_what_the_request_alone_finds_out(
    seed, capture_rows, depth, v2
):
    engine = Engine(seed, capture_rows, depth, v2)
    engine.play(80)
    answered = [r for r in engine.all if r.answered is not None]
    assert len(answered) > 5
    for request in answered:
        check(request, lost_allowed=capture_rows < 512)
