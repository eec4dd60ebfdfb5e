"""Neighbouring chunks' shards on different drives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.choice import Obstacle
from meshfusion.jbof.wear.shares import target_shares
from meshfusion.jbof.wear.spread import Stripe, choose_stripe, stripe_position
from meshfusion.jbof.wear.state import DriveState
from tests.jbof.wear.drives import SEGMENT_BYTES, drive, shelves


def stripe_of(drives: list[DriveState], most_drives: int) -> Stripe | Obstacle:
    return choose_stripe(drives, target_shares(drives), {}, segment_bytes=SEGMENT_BYTES, most_drives=most_drives)


def test_a_stripe_goes_over_enclosures_first() -> None:
    drives = [drive(name, domain=("rack", f"enclosure {at // 2}")) for at, name in enumerate("ABCDEF")]
    stripe = stripe_of(drives, 3)
    assert isinstance(stripe, Stripe)
    assert {state.domain for state in drives if state.drive_id in stripe.drive_ids} == {
        ("rack", "enclosure 0"), ("rack", "enclosure 1"), ("rack", "enclosure 2"),
    }  # fmt: skip


def test_a_stripe_has_as_many_drives_as_can() -> None:
    drives = [drive("A"), drive("B", budget_left_bytes=0), drive("C")]
    stripe = stripe_of(drives, 3)
    assert isinstance(stripe, Stripe)
    assert sorted(stripe.drive_ids) == ["A", "C"]
    assert stripe_of([], 3) is Obstacle.NO_DRIVE


@given(shelves(), st.integers(1, 7))
def test_a_stripes_drives_differ(drives: list[DriveState], most_drives: int) -> None:
    stripe = stripe_of(drives, most_drives)
    able = sum(
        state.accepts_segments
        and state.free_segments + state.reclaimable_segments > 0
        and state.openings_left > 0
        and state.budget_left_bytes >= SEGMENT_BYTES
        for state in drives
    )
    if isinstance(stripe, Obstacle):
        assert able == 0
        return
    assert len(stripe.drive_ids) == len(set(stripe.drive_ids)) == min(able, most_drives)


@given(
    start=st.integers(0, 2**64 - 1), shard_count=st.integers(1, 16), width=st.integers(1, 40), first=st.integers(0, 999)
)
def test_shards_that_follow_each_other_lie_on_different_drives(
    start: int, shard_count: int, width: int, first: int
) -> None:
    positions = [
        stripe_position(
            start=start, chunk_index=index // shard_count, shard_index=index % shard_count, shard_count=shard_count,
            stripe_width=width,
        )
        for index in range(first, first + width)
    ]  # fmt: skip
    assert sorted(positions) == list(range(width))
