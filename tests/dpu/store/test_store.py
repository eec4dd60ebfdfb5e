"""The store's decisions about chunks, one by one; tests/sim shows that they hold together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.types import ReserveOutcome as Outcome
from meshfusion.dpu.store.store import StoreOptions
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
    assert result.extents == (api.Extent(1, 0, 257, 5, 1),)
    assert pool.match("one", 0).chunks == ()
    assert pool.commit("one", result.grant_id) == (True,)
    reply = pool.match("one", 0, 1)
    shard = api.Shard(0, result.extents[0], 1, 1, 4096, (DIGEST,) * 4)
    assert reply.chunks == (api.ChunkRecord(key(0), b"I" * 32, "default", 0, 0, 16, (shard,)),)
    assert pool.store.leases.pinned_bytes == 12 * 4096, "its whole segment"
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


@pytest.mark.parametrize(
    ("chunks", "changes"), [((0, 1), {"group": 1}), ((0, 1), {"chunk_tokens": 8}), ((1, 0), {}), ((), {})]
)
def test_a_match_is_exact(pool: Driver, chunks: tuple[int, ...], changes: dict[str, int]) -> None:
    pool.put("one", item(0), item(1))
    assert len(pool.match("one", 0, 1).chunks) == 2
    assert pool.match("one", *chunks, **changes) == api.MatchReply("", 0, ())


def test_another_identity_or_position_never_matches(pool: Driver) -> None:
    pool.put("one", item(0), item(1, position_tokens=32))
    pool.attach("two", identity=b"J" * 32)
    assert pool.match("two", 0).chunks == ()
    assert [chunk.key for chunk in pool.match("one", 0, 1).chunks] == [key(0)]
    pool.chunks[key(5)] = replace(pool.chunks[key(0)], position_tokens=16)
    assert len(pool.match("one", 0, 5).chunks) == 1, "an entry under another key is damage"
    pool.chunks[key(0)] = replace(pool.chunks[key(0)], tenant="acme")
    assert pool.match("one", 0) == api.MatchReply("", 0, ()), "another tenant's"


def test_pinned_segments_have_a_cap_and_at_it_a_shorter_prefix_is_offered(pool: Driver) -> None:
    pool.put("one", *(item(i, units=9) for i in range(3)))
    lease = pool.match("one", 0, 1, 2)
    assert [chunk.key for chunk in lease.chunks] == [key(0), key(1)], "two of four segments may be pinned"
    assert pool.store.counts["match_shortened_by_pins"] == 1
    assert pool.store.leases.pinned_bytes == 2 * 12 * 4096
    assert len(pool.match("one", 0, 1).chunks) == 2, "a prefix that is pinned already costs nothing"
    assert pool.match("one", 0, 1, 2).chunks == lease.chunks
    pool.store.release(0.0, api.ReleaseRequest("one", (lease.lease_id,)))
    assert pool.store.leases.pinned_bytes == 2 * 12 * 4096


FULL, WINDOW, STATE = 0, 1, 2


def asked(count: int) -> tuple[api.GroupKeys, ...]:
    """Everything; the last two chunks; the state after the last one."""
    needs = {FULL: (0,) * count, WINDOW: tuple(max(0, i - 1) for i in range(count)), STATE: tuple(range(count))}
    return tuple(api.GroupKeys(g, tuple(key(i, g) for i in range(count)), need) for g, need in needs.items())


def test_all_groups_resume_at_a_boundary_or_none_does() -> None:
    pool = Driver(StoreOptions(max_pinned_fraction=1.0))
    pool.attach("one")
    pool.put("one", *(item(i, units=1, group=FULL) for i in range(4)))
    assert pool.match_groups("one", *asked(4)) == api.MatchReply("", 0, ())
    pool.put("one", *(item(i, units=1, group=STATE) for i in (0, 1, 3)))
    assert pool.match_groups("one", *asked(4)) == api.MatchReply("", 0, ())
    pool.put("one", *(item(i, units=1, group=WINDOW) for i in (0, 1, 3)))
    reply = pool.match_groups("one", *asked(4))
    assert reply.chunk_count == 2, "the window at 4 and the state at 3 are missing"
    wanted = [(FULL, 0), (FULL, 1), (WINDOW, 0), (WINDOW, 1), (STATE, 1)]
    assert [(chunk.group, chunk.position_tokens // 16) for chunk in reply.chunks] == wanted
    pool.put("one", item(2, units=1, group=WINDOW))
    reply = pool.match_groups("one", *asked(4))
    assert reply.chunk_count == 4
    wanted = [*((FULL, i) for i in range(4)), (WINDOW, 2), (WINDOW, 3), (STATE, 3)]
    assert [(chunk.group, chunk.position_tokens // 16) for chunk in reply.chunks] == wanted


def test_every_group_is_leased(pool: Driver) -> None:
    pool.put("one", item(0, units=9, group=FULL), item(0, units=9, group=STATE))
    full, _, state = asked(1)
    assert pool.match_groups("one", full, state).chunk_count == 1
    assert [pool.store.segments.pins(i)[0] for i in range(4)] == [1, 1, 0, 0]


def test_a_lower_boundary_is_offered_where_the_longest_would_pin_too_much(pool: Driver) -> None:
    """Two of four segments may be pinned: at 3 it takes three, at 1 all lies in one."""
    pool.put("one", item(0, units=4, group=WINDOW), item(0, units=4, group=STATE))
    pool.put("one", *(item(i, units=9, group=WINDOW) for i in (1, 2)), item(2, units=9, group=STATE))
    _, window, state = asked(3)
    reply = pool.match_groups("one", window, state)
    assert (reply.chunk_count, pool.store.counts["match_shortened_by_pins"]) == (1, 1)
    assert pool.store.segments.read_pinned_count == 1


def test_a_boundary_that_takes_nothing_stored_is_none(pool: Driver) -> None:
    """Nothing says then that the tokens before it were ever seen."""
    pool.put("one", item(0, units=1), item(1, units=1))
    nothing = api.GroupKeys(3, (b"",) * 3, (1, 2, 3))
    assert pool.match_groups("one", nothing) == api.MatchReply("", 0, ())
    local = api.GroupKeys(0, (key(0), key(1), b""), (0, 0, 3))
    reply = pool.match_groups("one", local, nothing)
    assert (reply.chunk_count, len(reply.chunks)) == (2, 2), "at 3 none of the groups needs anything"


def test_a_lookup_that_makes_no_sense_is_refused(pool: Driver) -> None:
    with pytest.raises(ServiceError, match=r"groups\[0\].first_needed\[1\] is 3; it must lie between 0 and 2"):
        pool.match_groups("one", api.GroupKeys(0, (key(0), key(1)), (0, 3)))


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
    assert pool.store.saves_stopped_reason(pool.now_s).startswith("disk full (for 0 s, 1 failed;")
    assert outcomes(pool.reserve("one", item(0))) == [Outcome.NO_SPACE]
    pool.pass_time(10.0)
    assert "disk full (for 10 s, 1 failed; the next" in pool.store.saves_stopped_reason(pool.now_s), "nobody knows yet"
    assert outcomes(pool.reserve("one", item(0))) == [Outcome.GRANTED]
    assert pool.store.saves_stopped_reason(pool.now_s) == ""


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


def test_a_bundle_is_one_transaction(pool: Driver) -> None:
    results = pool.reserve("one", item(0), item(0, group=STATE), item(1))
    step = pool.commit_step("one", *(result.grant_id for result in results[:2]), bundle=7)
    assert (step.reply.committed, len(step.effects)) == ((True, True), 2)
    assert pool.commit("one", results[2].grant_id, bundle=7) == (True,), "a bundle is one within its request"
    pool.settle(step)
    assert set(pool.chunks) == {key(0), key(0, STATE), key(1)}


@pytest.mark.parametrize("why", ["unknown", "expired", "doubtful", "another holder's", "twice", "under way"])
def test_one_refused_item_refuses_its_whole_bundle(pool: Driver, why: str) -> None:
    """What it does not refuse, and what is in no bundle, is committed; the places of the refused are free at once."""
    pool.attach("two")
    bad, *good = pool.reserve("one", item(0), item(1), item(2), item(3), item(4))
    bad_id = bad.grant_id
    under_way = None
    match why:
        case "unknown":
            pool.abort("one", bad_id)
        case "expired":
            grant = pool.store.grants.get("one", bad_id)
            assert grant is not None
            grant.expires_s = pool.now_s
        case "doubtful":
            pool.store.abort(0.0, api.AbortRequest("one", pool.epoch, (), (bad_id,)))
        case "another holder's":
            pool.abort("one", bad_id)
            bad_id = pool.reserve("two", item(0))[0].grant_id
        case "twice":
            pool.commit("one", bad_id)
        case "under way":
            under_way = pool.commit_step("one", bad_id)
    bundles = ((good[0].grant_id, 1), (bad_id, 1), (good[1].grant_id, 2), (good[2].grant_id, 2), (good[3].grant_id, 0))
    items = tuple(api.CommitItem(grant_id, ((DIGEST,) * 4,), bundle) for grant_id, bundle in bundles)
    step = pool.store.commit(pool.now_s, api.CommitRequest("one", pool.epoch, items))
    assert step.reply.committed == (False, False, True, True, True)
    assert pool.store.grants.get("one", good[0].grant_id) is None, "given back"
    assert not pool.store.grants.has_writer(key(1)), "another writer may try the chunk"
    if under_way is not None:
        pool.settle(under_way)
    pool.settle(step)
    committed_before = {key(0)} if why in ("twice", "under way") else set()
    assert set(pool.chunks) == {key(2), key(3), key(4)} | committed_before
    left = [grant.state.value for grant in pool.store.grants]
    assert left == {"doubtful": ["doubtful"], "another holder's": ["live"]}.get(why, [])


def test_the_same_grant_twice_in_a_bundle_refuses_it(pool: Driver) -> None:
    results = pool.reserve("one", item(0), item(1))
    first, second = (result.grant_id for result in results)
    assert pool.commit("one", first, second, first, bundle=1) == (False, False, False)
    assert (len(pool.store.grants), pool.chunks) == (0, {})


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
    for wrong in (replace(item(0), copies=2), replace(item(0), group=64), replace(item(0), shards=())):
        with pytest.raises(UnsupportedError, match="not served yet"):
            pool.reserve("one", wrong)
    with pytest.raises(ServiceError, match="does not fit a segment"):
        pool.reserve("one", item(0), item(1, units=GEOMETRY.max_extent_lba_count))
    assert len(pool.store.grants) == 0


@pytest.mark.parametrize("ranks", [(1,), (0, 0), (1, 0), (0, 2, 1), (0, 1024)])
def test_shards_are_of_rising_ranks_from_the_first_on(pool: Driver, ranks: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"ranks=\["):
        pool.reserve("one", sharded(*ranks))
    assert len(pool.store.grants) == 0


def test_a_chunk_is_visible_with_the_shards_of_all_ranks(pool: Driver) -> None:
    (result,) = pool.reserve("one", sharded(0, 2))
    assert len(set(result.extents)) == 2

    def commit(*digests: tuple[bytes, ...]) -> tuple[bool, ...]:
        request = api.CommitRequest("one", pool.epoch, (api.CommitItem(result.grant_id, digests),))
        reply: api.CommitReply = pool.settle(pool.store.commit(pool.now_s, request))
        return reply.committed

    for too_few in ((), ((b"0" * 8,),), ((b"0" * 8,), ()), ((), (b"2" * 8,))):
        with pytest.raises(ServiceError, match="its shards have"):
            commit(*too_few)
    assert pool.match("one", 0).chunks == ()
    assert commit((b"0" * 8,), (b"2" * 8,)) == (True,)
    (chunk,) = pool.match("one", 0).chunks
    assert [(s.rank, s.extent, s.unit_digests) for s in chunk.shards] == [
        (0, result.extents[0], (b"0" * 8,)),
        (2, result.extents[1], (b"2" * 8,)),
    ]


def test_a_chunk_is_dropped_for_what_one_rank_found(pool: Driver) -> None:
    (result,) = pool.reserve("one", sharded(0, 1))
    item_of = api.CommitItem(result.grant_id, ((b"0" * 8,), (b"1" * 8,)))
    pool.settle(pool.store.commit(pool.now_s, api.CommitRequest("one", pool.epoch, (item_of,))))
    request = api.DropRequest("one", key(0), result.extents[1], "no match")
    assert pool.settle(pool.store.drop(0.0, request, pool.chunks[key(0)]))
    assert pool.chunks == {}


def sharded(*ranks: int) -> api.ReserveItem:
    """Chunk 0 with one unit for each of these ranks."""
    return replace(item(0), shards=tuple(api.ShardSize(rank, 4096, 1) for rank in ranks))


def test_a_late_abort_of_an_earlier_epoch_hits_nothing(pool: Driver) -> None:
    (old,) = pool.reserve("one", item(0))
    pool.restart()
    pool.attach("one")
    (new,) = pool.reserve("one", item(0))
    pool.abort("one", old.grant_id)
    assert pool.store.grants.get("one", new.grant_id) is not None
    with pytest.raises(StaleHolderError):
        pool.store.commit(0.0, api.CommitRequest("one", 1, ()))
