"""Regions of the capture buffer: in turn, whole when needed, never before their copies."""

import pytest
import torch

from eyesplice.integration.captures import CaptureRing, Region
from eyesplice.integration.copies import CapturedRows


def test_a_step_that_captures_nothing_takes_no_turn():
    ring = CaptureRing(8)
    assert ring.region(0) == Region()
    assert [ring.region(1).start for _ in range(3)] == [0, 4, 0]


def test_more_rows_than_a_half_get_the_whole_buffer():
    ring = CaptureRing(8)
    assert ring.region(4) == Region(0, 4, 4)
    whole = ring.region(5)
    assert whole == Region(0, 8, 5) and whole.rows == 5
    assert ring.region(100).rows == 8


def test_a_region_waits_for_the_copies_of_its_own_rows_only():
    ring, waited = CaptureRing(8), []
    for name in ("first", "second"):
        ring.copying(ring.region(3), lambda name=name: waited.append(name))
    assert waited == []
    ring.region(3)
    assert waited == ["first"]
    whole = ring.region(8)
    assert waited == ["first", "second"]
    ring.copying(whole, lambda: waited.append("whole"))
    ring.region(1)
    assert waited == ["first", "second", "whole"]
    ring.region(1)
    assert waited == ["first", "second", "whole", "whole"]
    ring.region(8)
    assert len(waited) == 4


def test_a_buffer_of_one_row_is_used_whole():
    ring = CaptureRing(1)
    assert ring.region(1) == ring.region(3).__class__(0, 1, 1)
    assert ring.region(3).rows == 1


@pytest.mark.parametrize("early", [False, True])
def test_captured_rows_outlive_their_place(early: bool):
    capture = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    expected = capture[4:6].clone()
    rows = CapturedRows(capture, Region(4, 4, 3), None, None)
    if early:
        # The next step needs the place before the count is known.
        rows.make_way()
        capture.fill_(-1)
    found = rows.fetch(2)
    capture.fill_(-1)
    rows.make_way()
    assert found.shape == (2, 16)
    assert torch.equal(torch.from_numpy(found).view(torch.float32), expected)


def test_a_step_that_captured_nothing_has_no_rows():
    rows = CapturedRows(torch.zeros(8, 4), Region(0, 4, 3), None, None)
    assert rows.fetch(0).shape == (0, 16)
