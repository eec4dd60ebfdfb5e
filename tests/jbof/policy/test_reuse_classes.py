"""Which class a chunk is in."""

from __future__ import annotations

import numpy as np
import pytest

from meshfusion.jbof.policy import reuse_classes as rc


@pytest.mark.parametrize(
    ("tokens", "chunks", "known", "turns", "gap_s", "expected"),
    [
        (100, 1, 0, 0, 0.0, rc.FRESH),
        (1024, 2, 1, 900, 1.0, rc.FRESH + 1),  # a shared system prompt does not make a conversation
        (10**6, 2000, 0, 0, 0.0, rc.FRESH + rc.LENGTHS - 1),
        (2048, 8, 3, 2, 1.0, rc.BRANCH + 2),
        (2048, 8, 4, 1, 10.0, rc.GROWTH),
        (2048, 8, 7, 2, 17.0, rc.GROWTH + rc.TURNS + 1),
        (2048, 8, 7, 50, 1e6, rc.GROWTH + (rc.PACES - 1) * rc.TURNS + 2),
    ],
)
def test_class_of_new(tokens: int, chunks: int, known: int, turns: int, gap_s: float, expected: int) -> None:
    assert rc.class_of_new(tokens, chunks, known, turns, gap_s) == expected


def test_classes_of_used_cover_their_range_once() -> None:
    uses = np.repeat([2, 3, 5, 9, 20, 99], rc.PACES)
    pace = np.tile(np.arange(rc.PACES) + 4.0, rc.USES)
    assert rc.classes_of_used(uses, pace).tolist() == list(range(rc.USED, rc.PARTIAL))


def test_pace_is_a_moving_mean_from_the_second_use_on() -> None:
    uses, pace, gap_s = np.array([2, 3]), np.array([9.0, 6.0]), np.array([16.0, 16.0])
    assert rc.pace_after(uses, pace, gap_s).tolist() == [4.0, 5.0]


def test_a_chunk_without_all_its_tokens_is_apart() -> None:
    classes = rc.classify(np.array([3, 1, 1]), np.array([5.0, 0.0, 0.0]), rc.FRESH, whole_count=2)
    assert classes.tolist() == [rc.USED + rc.PACES + 1, rc.FRESH, rc.PARTIAL]


def test_a_chunk_is_worth_at_least_what_its_followers_are() -> None:
    gains = np.array([0.1, 0.9, 0.5, 0.3])
    classes = np.array([3, 0, 1, 2, 0, 1], np.uint8)
    assert rc.at_least_followers(classes, gains, whole_count=5).tolist() == [1, 1, 1, 2, 0, 1]
    assert rc.at_least_followers(classes, gains, whole_count=0).tolist() == classes.tolist()


def test_after_the_next_use() -> None:
    following = rc.next_classes()
    assert len(following) == len(rc.family_of_classes()) == rc.CLASS_COUNT
    assert following[rc.GROWTH + 2 * rc.TURNS] == rc.USED + 2
    assert following[rc.USED + 3] == rc.USED + rc.PACES + 3
    assert following[rc.PARTIAL - 1] == rc.PARTIAL - 1
