"""The drive on which the next segment is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.wear.choice import MOST_CREDIT, Choice, Obstacle, choose_drive
from meshfusion.jbof.wear.shares import target_shares
from meshfusion.jbof.wear.state import DriveState
from tests.jbof.wear.drives import SEGMENT_BYTES, drive, shelves


def chosen(
    drives: list[DriveState],
    shares: Mapping[str, float],
    credits: Mapping[str, float] | None = None,
    beside: tuple[str, ...] = (),
) -> Choice:
    found = choose_drive(drives, shares, credits or {}, segment_bytes=SEGMENT_BYTES, beside=beside)
    assert isinstance(found, Choice)
    return found


def sequence(drives: list[DriveState], shares: Mapping[str, float], count: int) -> list[str]:
    credits: Mapping[str, float] = {}
    ids = []
    for _ in range(count):
        found = chosen(drives, shares, credits)
        credits = found.credits
        ids.append(found.drive_id)
    return ids


def test_the_order_of_openings_is_as_even_as_the_shares_allow() -> None:
    """nginx, whose smooth weighted round robin this is, gives this order for weights of 5, 1 and 1."""
    drives = [drive("A"), drive("B"), drive("C")]
    assert "".join(sequence(drives, {"A": 5 / 7, "B": 1 / 7, "C": 1 / 7}, 14)) == "AABACAA" * 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 300))
def test_every_drive_has_had_its_share_to_within_a_few(weights: list[int], count: int) -> None:
    names = "ABCDEFGH"[: len(weights)]
    shares = {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}
    had = Counter(sequence([drive(name) for name in names], shares, count))
    assert all(abs(had[name] - share * count) <= 2 for name, share in shares.items())


@given(shelves(), st.dictionaries(st.sampled_from("ABCDEFGH"), st.floats(-8, 8)), st.sets(st.sampled_from("ABCDEF")))
def test_a_chosen_drive_can_take_a_segment_and_is_apart_where_one_is(
    drives: list[DriveState], credits: dict[str, float], beside: set[str]
) -> None:
    shares = target_shares(drives)
    found = choose_drive(drives, shares, credits, segment_bytes=SEGMENT_BYTES, beside=sorted(beside))
    able = {
        state.drive_id: state
        for state in drives
        if state.accepts_segments
        and state.free_segments + state.reclaimable_segments > 0
        and state.openings_left > 0
        and state.budget_left_bytes >= SEGMENT_BYTES
    }
    if isinstance(found, Obstacle):
        assert not able
        return
    assert found.drive_id in able
    assert found.must_reclaim == (able[found.drive_id].free_segments == 0)
    assert (found.drive_id in beside) <= (set(able) <= beside)
    assert set(found.credits) == set(shares)
    assert all(abs(credit) <= MOST_CREDIT for credit in found.credits.values())
    assert found == choose_drive(
        list(reversed(drives)), shares, credits, segment_bytes=SEGMENT_BYTES, beside=sorted(beside)
    )


@pytest.mark.parametrize(
    ("drives", "expected"),
    [
        ([], Obstacle.NO_DRIVE),
        ([drive(accepts_segments=False)], Obstacle.NO_DRIVE),
        ([drive(free_segments=0, reclaimable_segments=0), drive("B", accepts_segments=False)], Obstacle.NO_SPACE),
        ([drive(openings_left=0), drive("B", free_segments=0, reclaimable_segments=0)], Obstacle.ALL_OPEN),
        ([drive(budget_left_bytes=SEGMENT_BYTES - 1), drive("B", openings_left=0)], Obstacle.NO_BUDGET),
    ],
)
def test_what_is_in_the_way(drives: list[DriveState], expected: Obstacle) -> None:
    shares = target_shares(drives)
    assert choose_drive(drives, shares, {}, segment_bytes=SEGMENT_BYTES) is expected


def test_a_budget_may_be_used_up_exactly() -> None:
    drives = [drive(budget_left_bytes=SEGMENT_BYTES)]
    assert chosen(drives, {"A": 1.0}).drive_id == "A"


def test_neighbours_go_to_another_drive_and_rather_to_another_enclosure() -> None:
    near, far = ("rack 1", "enclosure 1"), ("rack 1", "enclosure 2")
    drives = [drive("A", domain=near), drive("B", domain=near), drive("C", domain=far)]
    shares = {"A": 0.34, "B": 0.33, "C": 0.33}
    assert chosen(drives, shares).drive_id == "A"
    assert chosen(drives, shares, beside=("A",)).drive_id == "C"
    assert chosen(drives, shares, beside=("A", "C")).drive_id == "B"
    assert chosen(drives[:1], {"A": 1.0}, beside=("A",)).drive_id == "A"  # rather there than nowhere


def test_place_does_not_outweigh_wear() -> None:
    """One drive alone in its enclosure, beside which nothing is: it still gets no more than its share."""
    drives = [drive(name, domain=("rack 1", "enclosure 1")) for name in "ABCDEFG"]
    drives.append(drive("H", domain=("rack 1", "enclosure 2")))
    shares = target_shares(drives)
    credits: Mapping[str, float] = {}
    had: Counter[str] = Counter()
    last = "A"
    for _ in range(800):
        found = chosen(drives, shares, credits, beside=(last,))
        credits, last = found.credits, found.drive_id
        had[last] += 1
    assert all(abs(had[name] - 100) <= 3 for name in "ABCDEFGH")


def test_a_drive_that_could_not_does_not_take_all_openings_later() -> None:
    shares = {"A": 0.5, "B": 0.5}
    credits: Mapping[str, float] = {}
    for _ in range(100):
        credits = chosen([drive("A"), drive("B", budget_left_bytes=0)], shares, credits).credits
    later = []
    for _ in range(10):
        found = chosen([drive("A"), drive("B")], shares, credits)
        credits = found.credits
        later.append(found.drive_id)
    assert Counter(later) == {"A": 5, "B": 5}


def test_a_drive_that_was_avoided_for_long_does_not_make_up_for_all_of_it() -> None:
    drives, shares = [drive("A"), drive("B")], {"A": 0.5, "B": 0.5}
    credits: Mapping[str, float] = {}
    for _ in range(1000):
        credits = chosen(drives, shares, credits, beside=("B",)).credits
    later = []
    for _ in range(30):
        found = chosen(drives, shares, credits)
        credits = found.credits
        later.append(found.drive_id)
    assert later[0] == "B"
    assert "A" in later[: 2 * 8 + 1]  # 8 credits of the one and as many missing of the other, a half each time


def test_credits_of_drives_that_are_gone_are_forgotten() -> None:
    assert set(chosen([drive("B")], {"B": 1.0}, {"A": 3.0, "B": 1.0}).credits) == {"B"}
