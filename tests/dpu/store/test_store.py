"""The store's decisions about chunks, one by one; tests/sim shows that they hold together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.types import ReserveOutcome as Outcome
from meshfusion.jbof.errors import ServiceError, StaleHolderError, UnsupportedError
from tests.dpu.store.driver import DIGEST, GEOMETRY, Driver, item, key


@pytest.fixture
def pool() -> Driver:
    driver = Driver()
    driver.attach("one")
    return driver


def outcomes(results: tuple[api.ReserveResult, ...]) -> list[Outcome]:
    return [result.outcome for result in results]


def test_reserve_commit_match(pool: Driver) -> None:
    (result,) = pool.reserve("one", item(0))
    assert result.extents == (api.Extent(1, 0, 256, 5, 1),)
    assert pool.match("one", 0).chunks == ()
    assert pool.commit("one", result.grant_id) == (True,)
    reply = pool.match("one", 0, 1)
    shard = api.Shard(0, result.extents[0], 1, 1, 4096, (DIGEST,) * 4)
    assert reply.chunks == (api.ChunkRecord(key(0), b"I" * 32, "default", 0, 0, 16, (shard,)),)
    assert pool.store.leases.pinned_bytes == 10 * 4096, "its whole segment"
    assert len(pool.store.grants) == 0


def test_a_chunk_is_not_stored_or_written_twice(pool: Driver) -> None:
    pool.attach("two")
    results = pool.reserve("one", item(0), item(1), item(0))
    assert outcomes(results) == [Outcome.GRANTED, Outcome.GRANTED, Outcome.BUSY]
    assert outcomes(pool.reserve("two", item(0))) == [Outcome.BUSY]
    step = pool.commit_step("one", results[0].grant_id)
    assert outcomes(pool.reserve("two", item(0))) == [Outcome.BUSY], "its commit is not durable yet"
    pool.settle(step)
    assert outcomes(pool.reserve("two", item(0))) == [Outcome.EXISTS]


def test_a_chunk_whose_segment_was_reopened_may_be_written_again(pool: Driver) -> None:
    pool.put("one", *(item(i, units=9) for i in range(4)))
    stale = dict(pool.chunks)
    pool.put("one", item(4, units=9))
    pool.chunks = stale  # as read before the reopening
    assert pool.match("one", 0).chunks == ()
    assert outcomes(pool.reserve("one", item(0, units=9))) == [Outcome.GRANTED]


@pytest.mark.parametrize("changes", [{"group": 1}, {"chunk_tokens": 8}, {"keys": (key(1), key(0))}, {"keys": ()}])
def test_a_match_is_exact(pool: Driver, changes: dict[str, object]) -> None:
    pool.put("one", item(0), item(1))
    assert len(pool.match("one", 0, 1).chunks) == 2
    assert pool.match("one", 0, 1, **changes) == api.MatchReply("", ())


def test_another_identity_or_position_never_matches(pool: Driver) -> None:
    pool.put("one", item(0), item(1, position_tokens=32))
    pool.attach("two", identity=b"J" * 32)
    assert pool.match("two", 0).chunks == ()
    assert [chunk.key for chunk in pool.match("one", 0, 1).chunks] == [key(0)]
    pool.chunks[key(5)] = replace(pool.chunks[key(0)], position_tokens=16)
    assert len(pool.match("one", 0, 5).chunks) == 1, "an entry under another key is damage"


def test_pinned_segments_have_a_cap_and_at_it_a_shorter_prefix_is_offered(pool: Driver) -> None:
    pool.put("one", *(item(i, units=9) for i in range(3)))
    lease = pool.match("one", 0, 1, 2)
    assert [chunk.key for chunk in lease.chunks] == [key(0), key(1)], "two of four segments may be pinned"
    assert pool.store.counters["match_shortened_by_pins"] == 1
    assert pool.store.leases.pinned_bytes == 2 * 10 * 4096
    assert len(pool.match("one", 0, 1).chunks) == 2, "a prefix that is pinned already costs nothing"
    assert pool.match("one", 0, 1, 2).chunks == lease.chunks
    pool.store.release(0.0, api.ReleaseRequest("one", (lease.lease_id,)))
    assert pool.store.leases.pinned_bytes == 2 * 10 * 4096


def test_leases_end_by_time_unless_renewed(pool: Driver) -> None:
    pool.put("one", item(0))
    lease_id = pool.match("one", 0).lease_id
    pool.pass_time(20)
    beat = api.HeartbeatRequest("one", pool.epoch, (lease_id, "gone"))
    assert pool.store.heartbeat(pool.now_s, beat).lost_lease_ids == ("gone",)
    pool.pass_time(29)
    assert len(pool.store.leases) == 1
    pool.pass_time(1)
    assert pool.store.heartbeat(pool.now_s, beat).lost_lease_ids == (lease_id, "gone")


def test_a_leased_segment_is_not_reclaimed(pool: Driver) -> None:
    pool.put("one", *(item(i, units=9) for i in range(4)))
    assert len(pool.match("one", 0, 1).chunks) == 2
    results = pool.reserve("one", item(10, units=9), item(11, units=9))
    assert outcomes(results) == [Outcome.GRANTED, Outcome.GRANTED]
    assert {extent.segment for result in results for extent in result.extents} == {2, 3}
    assert outcomes(pool.reserve("one", item(12))) == [Outcome.NO_SPACE]


def test_extents_wait_for_their_opening(pool: Driver) -> None:
    first = pool.reserve_step("one", item(0))
    second = pool.reserve_step("one", item(1))
    assert (first.after, second.ticket, second.after) == (0, 0, first.ticket)
    third = pool.reserve_step("one", item(2))
    assert third.after == 0, "it stands on its own opening"
    assert third.ticket == first.ticket + 1
    pool.settle(first)
    pool.settle(third)
    assert pool.reserve_step("one", item(3)).after == 0


def test_a_reserve_over_two_segments_waits_for_both(pool: Driver) -> None:
    opening = pool.reserve_step("one", item(0))
    spanning = pool.reserve_step("one", item(1), item(2))
    assert (spanning.after, spanning.ticket) == (opening.ticket, opening.ticket + 1)
    assert [e.segment for r in spanning.reply.results for e in r.extents] == [0, 1]


def test_a_failed_opening_takes_its_grants_back(pool: Driver) -> None:
    opening = pool.reserve_step("one", item(0))
    pool.reserve_step("one", item(1))
    pool.fail(opening)
    assert len(pool.store.grants) == 0
    assert [pool.store.segments.pins(i) for i in range(4)] == [(0, 0)] * 4
    assert pool.store.saves_stopped_reason(pool.now_s) == "disk full"
    assert outcomes(pool.reserve("one", item(0))) == [Outcome.NO_SPACE]
    pool.pass_time(10.0)
    assert pool.store.saves_stopped_reason(pool.now_s) == ""
    assert outcomes(pool.reserve("one", item(0))) == [Outcome.GRANTED]


def test_hits_go_on_while_saves_pause_and_a_success_ends_the_pause(pool: Driver) -> None:
    pool.put("one", item(0))
    (result,) = pool.reserve("one", item(1))
    pool.fail(pool.commit_step("one", result.grant_id))
    assert len(pool.store.grants) == 0
    assert len(pool.match("one", 0, 1).chunks) == 1
    assert outcomes(pool.reserve("one", item(1))) == [Outcome.NO_SPACE]
    pool.attach("two")
    assert outcomes(pool.reserve("one", item(1))) == [Outcome.GRANTED]


def test_commit_is_refused_once_expiry_began(pool: Driver) -> None:
    results = pool.reserve("one", item(0), item(1))
    pool.now_s = 60.0  # no tick came by yet
    assert pool.commit("one", results[0].grant_id) == (False,)
    pool.pass_time(0.0)
    assert pool.store.quarantined_segment_count() == 1
    assert pool.commit("one", results[1].grant_id) == (False,)
    assert (pool.store.quarantined_segment_count(), len(pool.store.grants)) == (0, 0), "its holder has answered"
    assert pool.match("one", 0).chunks == ()


def test_a_commit_counts_once(pool: Driver) -> None:
    pool.attach("two")
    (result,) = pool.reserve("one", item(0))
    assert pool.commit("two", result.grant_id) == (False,), "another holder's"
    step = pool.commit_step("one", result.grant_id, result.grant_id, "unknown")
    assert step.reply.committed == (True, False, False)
    pool.abort("one", result.grant_id)  # too late: it is being made durable
    pool.settle(step)
    assert pool.commit("one", result.grant_id) == (False,)
    assert len(pool.chunks) == 1


@pytest.mark.parametrize("digests", [((DIGEST,) * 3,), ((DIGEST,) * 4, ()), ((b"short",) * 4,), ()])
def test_a_commit_with_wrong_digests_changes_nothing(pool: Driver, digests: tuple[tuple[bytes, ...], ...]) -> None:
    results = pool.reserve("one", item(0), item(1))
    items = (api.CommitItem(results[0].grant_id, ((DIGEST,) * 4,)), api.CommitItem(results[1].grant_id, digests))
    with pytest.raises(ServiceError, match="digests"):
        pool.store.commit(0.0, api.CommitRequest("one", pool.epoch, items))
    assert pool.commit("one", *(result.grant_id for result in results)) == (True, True)


def test_expired_space_is_quarantined_until_the_holder_answers(pool: Driver) -> None:
    """Two of four segments are more than the quarter that may be quarantined."""
    results = pool.reserve("one", item(0, units=9), item(1, units=9))
    pool.pass_time(60.0)
    assert "2 segments" in pool.store.saves_stopped_reason(pool.now_s)
    pool.attach("two")
    assert outcomes(pool.reserve("two", item(5))) == [Outcome.NO_SPACE]
    pool.abort("one", results[0].grant_id)
    assert outcomes(pool.reserve("two", item(0))) == [Outcome.GRANTED], "another writer may try the chunk"


def test_drop_forgets_only_what_was_meant(pool: Driver) -> None:
    pool.put("one", item(0))
    extent = pool.chunks[key(0)].shards[0].extent

    def drop(extent: api.Extent) -> bool:
        request = api.DropRequest("one", key(0), extent, "no match")
        return bool(pool.settle(pool.store.drop(0.0, request, pool.chunks.get(key(0)))))

    assert not drop(replace(extent, generation=2))
    assert drop(extent)
    assert not drop(extent)
    assert pool.chunks == {}


def test_what_is_not_served_is_refused_by_name(pool: Driver) -> None:
    for wrong in (replace(item(0), copies=2), replace(item(0), group=1), replace(item(0), shards=())):
        with pytest.raises(UnsupportedError, match="not served yet"):
            pool.reserve("one", wrong)
    with pytest.raises(ServiceError, match="does not fit a segment"):
        pool.reserve("one", item(0), item(1, units=GEOMETRY.segment_lba_count))
    assert len(pool.store.grants) == 0


def test_a_late_abort_of_an_earlier_epoch_hits_nothing(pool: Driver) -> None:
    (old,) = pool.reserve("one", item(0))
    pool.restart()
    pool.attach("one")
    (new,) = pool.reserve("one", item(0))
    pool.abort("one", old.grant_id)
    assert pool.store.grants.get("one", new.grant_id) is not None
    with pytest.raises(StaleHolderError):
        pool.store.commit(0.0, api.CommitRequest("one", 1, ()))
