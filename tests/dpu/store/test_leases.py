"""Read leases: they pin each segment once, end by release, time or holder, and never twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from meshfusion.dpu.store.leases import Lease, LeaseTable
from meshfusion.jbof.segments import SegmentGeometry, SegmentTable

GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=10, segment_count=4)


@pytest.fixture
def segments() -> SegmentTable:
    return SegmentTable(GEOMETRY)


@pytest.fixture
def leases(segments: SegmentTable) -> LeaseTable:
    return LeaseTable(segments, epoch=3, ttl_s=30.0)


def test_a_lease_pins_each_segment_once(segments: SegmentTable, leases: LeaseTable) -> None:
    lease = leases.grant(0.0, "holder", "request", [2, 1, 2])
    assert lease.segments == (1, 2)
    assert lease.expires_s == 30.0
    assert [segments.pins(i)[0] for i in range(4)] == [0, 1, 1, 0]
    assert leases.pinned_bytes == 2 * 10 * 4096
    assert list(leases) == [lease]


def test_release_is_idempotent_and_only_the_owners(segments: SegmentTable, leases: LeaseTable) -> None:
    lease = leases.grant(0.0, "holder", "request", [1])
    assert not leases.release("stranger", lease.lease_id)
    assert leases.release("holder", lease.lease_id)
    assert not leases.release("holder", lease.lease_id)
    assert not leases.release("holder", "unknown")
    assert (segments.pins(1), leases.pinned_bytes, len(leases)) == ((0, 0), 0, 0)


def test_renewal_names_what_is_gone(leases: LeaseTable) -> None:
    kept = leases.grant(0.0, "holder", "a", [1])
    foreign = leases.grant(0.0, "other", "b", [1])
    assert leases.renew(20.0, "holder", [kept.lease_id, foreign.lease_id, "gone"]) == (foreign.lease_id, "gone")
    assert leases.expire(30.0) == 1, "the one that was not renewed"
    assert leases.expire(49.9) == 0
    assert leases.expire(50.0) == 1


def test_a_holder_that_leaves_takes_its_leases_along(segments: SegmentTable, leases: LeaseTable) -> None:
    for holder in ("one", "two", "one"):
        leases.grant(0.0, holder, "r", [0, 3])
    assert leases.count_of("one") == 2
    assert leases.drop_holder("one") == 2
    assert leases.drop_holder("one") == 0
    assert (leases.pinned_bytes, segments.pins(3)) == (2 * 10 * 4096, (1, 0))


def test_ids_are_unique_over_holders_and_epochs(segments: SegmentTable, leases: LeaseTable) -> None:
    later = LeaseTable(segments, epoch=4, ttl_s=30.0)
    tables = (leases, leases, later, later)
    ids = {table.grant(0.0, f"same-prefix-{i}", "r", []).lease_id for i, table in enumerate(tables)}
    assert len(ids) == 4


def test_the_oldest_lease_and_the_count_of_each_holder(leases: LeaseTable) -> None:
    assert leases.oldest_s(5.0) == 0.0
    first = leases.grant(10.0, "one", "r", [0])
    second = leases.grant(12.0, "two", "r", [1])
    leases.renew(30.0, "one", [first.lease_id])
    assert leases.oldest_s(31.0) == 21.0, "renewing makes it no younger"
    assert (leases.count_of("one"), leases.count_of("two"), leases.count_of("none")) == (1, 1, 0)
    assert leases.expire(42.0) == 1
    assert (leases.count_of("two"), leases.oldest_s(43.0)) == (0, 33.0)
    leases.release("one", first.lease_id)
    assert not leases.release("two", second.lease_id)
    assert (leases.count_of("one"), leases.oldest_s(44.0)) == (0, 0.0)


def test_counting_a_holders_leases_does_not_look_at_those_of_others(leases: LeaseTable) -> None:
    """Every look at the pool counts for every holder, under the mutex that lookups wait for."""
    for i in range(5000):
        leases.grant(0.0, f"h{i % 64}", "r", [0])
    leases._leases = _Untouchable(leases._leases)
    assert [leases.count_of(f"h{i}") for i in range(64)] == [79] * 8 + [78] * 56
    assert leases.oldest_s(1.0) == 1.0


class _Untouchable(dict[str, Lease]):
    """Only its first is looked at."""

    def values(self) -> Any:
        return itertools.chain(itertools.islice(super().values(), 1), self._refuse())

    def _refuse(self) -> Any:
        raise AssertionError("looked through")
        yield
