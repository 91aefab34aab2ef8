"""Captured rows on their way: handed on as they are, and told apart at the end."""

import numpy as np

from eyesplice.integration.captured import Captured
from eyesplice.integration.raw_answers import RawAnswer


def chunk(*rows: tuple[int, int], width=3) -> Captured:
    """Rows (capture, position), whose bytes are 10 x capture + position."""
    captures, positions = np.array(rows, np.int32).T.copy()
    data = (10 * captures + positions).astype(np.uint8)[:, None]
    return Captured(captures, positions, np.tile(data, (1, width)))


def test_no_byte_is_copied_between_the_worker_and_the_answer():
    found, answer = chunk((0, 4), (2, 4), (2, 5)), RawAnswer()
    core = RawAnswer()
    core.add_captures([found])
    answer.add_plain(core.to_plain())
    positions, data = answer.captured([2])
    assert positions.tolist() == [4, 5]
    assert data.tolist() == [[24] * 3, [25] * 3]
    assert np.shares_memory(data, found.data)


def test_the_rows_of_a_capture_come_together_over_steps_and_lengths():
    answer = RawAnswer()
    answer.add_captures([chunk((0, 0), (0, 1), (3, 1)), chunk((1, 0), width=2)])
    assert answer.captured([0])[0].tolist() == [0, 1]
    answer.add_captures([chunk((0, 2), (3, 2))])
    assert answer.captured([0])[0].tolist() == [0, 1, 2]
    assert answer.captured([0])[1].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert answer.captured([1])[1].tolist() == [[10, 10]]
    assert answer.captured([3])[0].tolist() == [1, 2]


def test_a_position_that_comes_again_overwrites_the_one_before():
    answer = RawAnswer()
    answer.add_captures([chunk((0, 1), (0, 2), (1, 0))])
    answer.add_captures([chunk((1, 1), (1, 2))])
    positions, data = answer.captured([0, 1])
    assert positions.tolist() == [0, 1, 2]
    assert data[:, 0].tolist() == [10, 11, 12]


def test_a_capture_without_rows_is_empty():
    answer = RawAnswer()
    answer.add_captures([chunk((1, 0))])
    positions, data = answer.captured([0, 2])
    assert positions.shape == (0,) and positions.dtype == np.int32
    assert data.shape[0] == 0 and data.dtype == np.uint8
