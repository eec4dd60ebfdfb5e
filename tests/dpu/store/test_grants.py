"""Write grants: they pin until their fate is known; time alone only makes them expired."""

from __future__ import annotations

import pytest

from meshfusion.dpu.api.types import Extent, ReserveItem, ShardSize
from meshfusion.dpu.store.grants import GrantState, GrantTable
from meshfusion.jbof.segments import SegmentGeometry, SegmentTable

GEOMETRY = SegmentGeometry(lba_bytes=4096, data_start_lba=256, segment_lba_count=10, segment_count=4)


@pytest.fixture
def segments() -> SegmentTable:
    return SegmentTable(GEOMETRY)


@pytest.fixture
def grants(segments: SegmentTable) -> GrantTable:
    return GrantTable(segments, epoch=3, ttl_s=60.0)


def item(name: bytes) -> ReserveItem:
    return ReserveItem(name * 32, 0, 0, 16, (ShardSize(0, 4096, 1),))


def extents(*in_segments: int) -> tuple[Extent, ...]:
    return tuple(Extent(1, segment, 256 + 10 * segment, 2, 1) for segment in in_segments)


def test_a_grant_pins_and_keeps_others_off_its_key(segments: SegmentTable, grants: GrantTable) -> None:
    grant = grants.add(0.0, "holder", item(b"a"), extents(0, 2))
    assert [segments.pins(i)[1] for i in range(4)] == [1, 0, 1, 0]
    assert grants.has_writer(b"a" * 32)
    assert not grants.has_writer(b"b" * 32)
    assert grants.get("holder", grant.grant_id) is grant
    assert grants.get("stranger", grant.grant_id) is None
    assert grants.get("holder", "unknown") is None
    grants.resolve(grant)
    assert (segments.pins(0), len(grants), grants.has_writer(b"a" * 32)) == ((0, 0), 0, False)


def test_expiry_frees_the_key_but_not_the_space(segments: SegmentTable, grants: GrantTable) -> None:
    grant = grants.add(0.0, "holder", item(b"a"), extents(1))
    assert grants.expire(59.9) == 0
    assert grants.expire(60.0) == 1
    assert grants.expire(61.0) == 0
    assert grant.state is GrantState.EXPIRED
    assert not grants.has_writer(b"a" * 32)
    assert segments.pins(1) == (0, 1)
    assert grants.quarantined_segment_count == 1


def test_a_commit_on_its_way_does_not_expire(grants: GrantTable) -> None:
    grant = grants.add(0.0, "holder", item(b"a"), extents(1))
    grant.state = GrantState.COMMITTING
    assert grants.expire(1000.0) == 0
    assert grants.quarantined_segment_count == 0


def test_resolving_an_expired_grant_leaves_its_successor_alone(grants: GrantTable) -> None:
    old = grants.add(0.0, "one", item(b"a"), extents(0))
    grants.expire(60.0)
    new = grants.add(61.0, "two", item(b"a"), extents(1))
    grants.resolve(old)
    assert grants.has_writer(b"a" * 32)
    assert grants.of_holder("two") == (new,)
    assert (grants.count_of("one"), grants.count_of("two")) == (0, 1)


def test_a_key_has_one_writer(grants: GrantTable) -> None:
    grants.add(0.0, "one", item(b"a"), extents(0))
    with pytest.raises(AssertionError):
        grants.add(0.0, "two", item(b"a"), extents(1))


def test_ids_are_unique_over_holders_and_epochs(segments: SegmentTable, grants: GrantTable) -> None:
    later = GrantTable(segments, epoch=4, ttl_s=60.0)
    tables = (grants, grants, later, later)
    ids = {t.add(0.0, f"same-prefix-{i}", item(bytes([i])), extents(0)).grant_id for i, t in enumerate(tables)}
    assert len(ids) == 4


def test_the_oldest_grant_and_the_count_of_each_holder(grants: GrantTable) -> None:
    assert grants.oldest_s(5.0) == 0.0
    first = grants.add(10.0, "one", item(b"a"), extents(0))
    second = grants.add(12.0, "two", item(b"b"), extents(1))
    third = grants.add(13.0, "one", item(b"c"), extents(2))
    assert (grants.count_of("one"), grants.count_of("two"), grants.count_of("none")) == (2, 1, 0)
    assert grants.of_holder("one") == (first, third)
    assert grants.oldest_s(20.0) == 10.0
    grants.doubt(second)
    assert [grants.is_quarantined(i) for i in range(3)] == [False, True, False]
    grants.resolve(first)
    assert (grants.count_of("one"), grants.of_holder("one"), grants.oldest_s(20.0)) == (1, (third,), 8.0)
    grants.resolve(second)
    grants.resolve(third)
    assert (grants.count_of("one"), grants.count_of("two"), grants.oldest_s(20.0)) == (0, 0, 0.0)
    assert not grants.is_quarantined(1)
