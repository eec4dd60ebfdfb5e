"""Which path is taken, with numbers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.path.flexpath.choice import Candidate, choose, limit_bytes
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.speed import Speed

MB = 1_000_000
SETTINGS = SpreadSettings(max_outstanding_bytes=100 * MB, min_outstanding_bytes=4 * MB, queue_s=0.05)


def measured(bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> Speed:
    speed = Speed(bandwidth_bytes_per_s, latency_s)
    for ahead_bytes in (MB, 10 * MB, MB, 10 * MB):
        speed.observe(0.0, ahead_bytes, latency_s + ahead_bytes / bandwidth_bytes_per_s)
    return speed


def candidate(path: int, bandwidth_bytes_per_s: float = 1e9, **changes: object) -> Candidate:
    made = Candidate(path, measured(bandwidth_bytes_per_s), 1.0, 1.0, 0, 0, True, False, False)
    return replace(made, **changes)  # type: ignore[arg-type]


def chosen(*candidates: Candidate, length_bytes: int = MB, backlog_bytes: int = 0, **options: object) -> int | None:
    arguments: dict[str, object] = {"time_left_s": 10.0, "is_probe_allowed": True, "settings": SETTINGS, **options}
    backlog_bytes = backlog_bytes or length_bytes
    return choose(candidates, length_bytes, backlog_bytes=backlog_bytes, **arguments)  # type: ignore[arg-type]


def test_the_one_that_is_done_first() -> None:
    """1 MB at 1 GB/s is 1 ms, behind 4 MB 5 ms; at 0.3 GB/s it is 3.3 ms."""
    slow = candidate(1, 0.3e9)
    assert chosen(candidate(0), slow) == 0
    assert chosen(candidate(0, outstanding_bytes=2 * MB), slow) == 0
    assert chosen(candidate(0, outstanding_bytes=4 * MB), slow) == 1


def test_latency_counts_for_small_requests_only() -> None:
    near, far = candidate(0, 1e9), candidate(1, 10e9, speed=measured(10e9, 0.002))
    assert chosen(near, far, length_bytes=MB) == 0
    assert chosen(near, far, length_bytes=3 * MB) == 1  # 3 ms, or 2.3 ms


def test_a_far_path_is_taken_when_the_near_one_is_that_much_busier() -> None:
    far = candidate(1, weight=3.0)
    assert chosen(candidate(0, outstanding_bytes=MB), far) == 0
    assert chosen(candidate(0, outstanding_bytes=3 * MB), far) == 1


def test_a_path_with_a_small_share_is_taken_when_others_are_busy() -> None:
    entering = candidate(1, share=1 / 16)
    assert chosen(candidate(0, outstanding_bytes=14 * MB), entering) == 0
    assert chosen(candidate(0, outstanding_bytes=16 * MB), entering) == 1


def test_not_optimized_paths_only_when_no_other_is_left() -> None:
    other = candidate(1, 100e9, is_optimized=False)
    assert chosen(candidate(0, 0.1e9, outstanding_bytes=2 * MB), other) == 0
    assert chosen(other) == 1
    assert chosen(candidate(0, outstanding_bytes=50 * MB), other) is None, "it waits rather"


def test_a_replay_goes_elsewhere_if_it_can() -> None:
    tried = candidate(0, was_tried=True)
    assert chosen(tried, candidate(1, 0.1e9)) == 1
    assert chosen(tried) == 0


def test_a_path_that_was_not_heard_of_is_probed_by_reads_alone() -> None:
    forgotten = candidate(1, 0.01e9, wants_probe=True)
    assert chosen(candidate(0), forgotten) == 1
    assert chosen(candidate(0), forgotten, is_probe_allowed=False) == 0
    assert chosen(candidate(0), replace(forgotten, outstanding_bytes=MB)) == 0, "once"


def test_the_bound_is_what_moves_in_latency_and_queue_time() -> None:
    assert limit_bytes(measured(1e9), 1.0, SETTINGS) == pytest.approx(50 * MB, rel=0.01)
    assert limit_bytes(measured(1e9, 0.010), 1.0, SETTINGS) == pytest.approx(60 * MB, rel=0.01)
    assert limit_bytes(measured(1e9), 0.25, SETTINGS) == pytest.approx(12.5 * MB, rel=0.01)
    assert limit_bytes(measured(100e9), 1.0, SETTINGS) == 100 * MB
    assert limit_bytes(measured(0.01e9), 1.0, SETTINGS) == 4 * MB
    assert limit_bytes(Speed(1e9, 0.001), 1.0, SETTINGS) == 4 * MB, "not measured"


def test_a_full_path_gets_nothing_but_an_empty_one_always_gets_one() -> None:
    assert chosen(candidate(0, outstanding_bytes=50 * MB)) is None
    assert chosen(candidate(0), length_bytes=500 * MB) == 0
    busy = candidate(0, outstanding_bytes=MB, outstanding_requests=SETTINGS.max_outstanding_requests)
    assert chosen(busy) is None


def test_a_slow_path_is_left_alone_while_the_full_one_is_sooner_done_with_all_that_waits() -> None:
    """The full one needs 50 ms and 1 ms for each MB that waits, the slow one 100 ms for one."""
    full, slow = candidate(0, outstanding_bytes=50 * MB), candidate(1, 0.01e9)
    assert chosen(full, slow, backlog_bytes=MB) is None
    assert chosen(full, slow, backlog_bytes=40 * MB) is None
    assert chosen(full, slow, backlog_bytes=60 * MB) == 1


def test_what_cannot_make_its_deadline_is_not_sent() -> None:
    """20 MB at 1 GB/s are expected to take 20 ms, and twice that is allowed for."""
    busy = candidate(0, outstanding_bytes=19 * MB)
    assert chosen(busy, time_left_s=0.050) == 0
    assert chosen(busy, time_left_s=0.030) is None
    assert chosen(candidate(0), length_bytes=20 * MB, time_left_s=0.030) == 0, "an empty path is tried"


def test_without_candidates_it_waits() -> None:
    assert chosen() is None


@given(
    st.lists(
        st.builds(
            candidate,
            path=st.integers(0, 9),
            bandwidth_bytes_per_s=st.floats(1e6, 1e11),
            weight=st.floats(1, 4),
            share=st.floats(0.01, 1),
            outstanding_bytes=st.integers(0, 200 * MB),
            is_optimized=st.booleans(),
            was_tried=st.booleans(),
            wants_probe=st.booleans(),
        ),
        max_size=6,
        unique_by=lambda c: c.path,
    ),
    st.integers(1, 100 * MB),
    st.integers(0, 500 * MB),
    st.booleans(),
)
def test_bounds_and_access_hold_whatever_there_is(
    candidates: list[Candidate], length_bytes: int, others_bytes: int, is_probe_allowed: bool
) -> None:
    path = chosen(
        *candidates,
        length_bytes=length_bytes,
        backlog_bytes=length_bytes + others_bytes,
        is_probe_allowed=is_probe_allowed,
    )
    if path is None:
        assert len(candidates) != 1 or candidates[0].outstanding_bytes, "the only path is idle, and nothing is sent"
        return
    (taken,) = (c for c in candidates if c.path == path)
    assert taken.is_optimized or not any(c.is_optimized for c in candidates)
    limit = limit_bytes(taken.speed, taken.share, SETTINGS)
    assert taken.outstanding_bytes == 0 or taken.outstanding_bytes + length_bytes <= limit <= 100 * MB
