"""The pool client against a service that misbehaves, and against the real pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import MAX_ITEMS
from meshfusion.dpu.pool import Pool, PoolOptions, create_pool
from meshfusion.host.pool_events import (
    ALONE,
    NOTHING_STORED,
    Attached,
    Committed,
    GrantedRun,
    LeasesLost,
    Matched,
    Reserved,
    ReserveFailed,
    StoredBoundary,
    StoredGroup,
)
from meshfusion.jbof.errors import ServiceUnavailableError, StaleHolderError
from tests.host.support.chunk_records import make_records, number_key
from tests.host.support.controlled_service import ControlledService, refusal, stale, unavailable
from tests.host.support.pool_client_rig import (
    CHUNK_TOKENS,
    IDENTITY,
    OTHER_IDENTITY,
    SHARD,
    UNITS,
    Rig,
    asked,
    attached,
    grant,
    granted,
    keys,
    reserve,
    wish,
)
from tests.host.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_reattach")


# ---- lookups -------------------------------------------------------------------------------------------------------


def test_a_hit_carries_the_lease_and_the_stored_prefix(service: ControlledService) -> None:
    with attached(service) as rig:
        answer = rig.match((*keys(2), b"x" * 32, number_key(2)))
        assert stored_keys(answer) == keys(2)
        assert answer.lease_id in service.leases
        (request,) = service.calls["match"]
        assert (request.holder_id, request.request_id) == (rig.attachment.holder_id, "r")
        assert request.chunk_tokens == CHUNK_TOKENS
        rig.client.release((answer.lease_id,))
        until(lambda: not service.leases)


@pytest.mark.parametrize("wanted", [(b"x" * 32,), (), None])
def test_a_miss_whatever_the_reason(service: ControlledService, wanted: tuple[bytes, ...] | None) -> None:
    with attached(service) as rig:
        answer = rig.match(wanted)
        assert (answer.lease_id, answer.stored) == ("", NOTHING_STORED)
        assert len(service.calls["match"]) == (1 if wanted else 0)


def test_a_lookup_that_waited_past_its_deadline_is_a_miss_without_asking(service: ControlledService) -> None:
    with attached(service) as rig:
        assert rig.match(keys(2), deadline_s=-0.001).stored == NOTHING_STORED
        assert service.calls["match"] == []


def test_a_lookup_whose_keys_cannot_be_made_is_answered_too(service: ControlledService) -> None:
    with attached(service) as rig:
        rig.client.match("r", 1, raise_key_error, time.monotonic() + 5)
        assert rig.expect(Matched) == Matched("r", 1, "", NOTHING_STORED)


def test_a_slow_service_holds_up_no_later_lookup_for_long(service: ControlledService) -> None:
    with attached(service) as rig:
        service.holds["match"] = threading.Event()  # hangs until the deadline it is given
        started_s = time.monotonic()
        deadline_s = started_s + 0.02
        for attempt in range(5):
            rig.client.match("r", attempt, lambda: asked(keys(2)), deadline_s)
        answers = [rig.expect(Matched) for _ in range(5)]
        assert sorted(answer.attempt for answer in answers) == list(range(5))
        assert all(answer.stored == NOTHING_STORED for answer in answers)
        assert time.monotonic() - started_s < 1.0
        assert len(service.calls["match"]) == 1  # the others were past their deadline when their turn came
        assert rig.client.attachment == rig.attachment  # merely slow: no reason to let go
        del service.holds["match"]
        assert rig.match(keys(2), attempt=9).stored.chunk_count


def test_an_answer_that_comes_a_little_late_still_carries_its_lease(service: ControlledService) -> None:
    with attached(service) as rig:
        service.holds["match"] = threading.Event()
        threading.Timer(0.1, service.holds["match"].set).start()
        answer = rig.match(keys(2), deadline_s=0.02)
        assert answer.lease_id in service.leases  # the state machine gives it back: test_lookups
        rig.client.release((answer.lease_id,))
        until(lambda: not service.leases)


def stored_keys(answer: Matched) -> tuple[bytes, ...]:
    (group,) = answer.stored.groups
    assert len(group.keys) == answer.stored.chunk_count
    return group.keys


def stored(chunk: api.ChunkRecord) -> StoredBoundary:
    """One chunk, column by column."""
    (shard,) = chunk.shards
    first = shard.extent.lba + shard.payload_lba_offset
    lbas = tuple(first + i * shard.unit_lba_count for i in range(len(shard.unit_digests)))
    return StoredBoundary(1, (StoredGroup(0, 0, (chunk.key,), (shard.extent,), (lbas,), (shard.unit_digests,)),))


FIRST, SECOND = make_records(2, block_tokens=16, blocks_per_chunk=4, identity=IDENTITY)


@pytest.mark.parametrize(
    "lie",
    [
        replace(SECOND, key=b"k" * 32),
        replace(SECOND, identity=OTHER_IDENTITY),
        replace(SECOND, position_tokens=0),
        replace(SECOND, token_count=32),
        replace(SECOND, shards=()),
        replace(SECOND, shards=SECOND.shards * 2),
    ],
)
def test_an_answer_with_anything_not_asked_for_is_not_believed(
    service: ControlledService, lie: api.ChunkRecord
) -> None:
    with attached(service) as rig:
        service.match_chunks = (FIRST, lie)
        answer = rig.match(keys(2))
        assert answer.stored == NOTHING_STORED
        assert answer.lease_id, "it is to be given back all the same"
        service.match_chunks = (lie,)
        assert rig.match(keys(2), attempt=2).stored == NOTHING_STORED
        service.match_chunks = (FIRST,)
        assert rig.match(keys(2), attempt=3).stored == stored(FIRST)


def test_more_chunks_than_asked_for(service: ControlledService) -> None:
    with attached(service) as rig:
        service.match_chunks = (FIRST, SECOND)
        assert rig.match(keys(1)).stored == NOTHING_STORED


# ---- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [unavailable(), refusal(), stale(), RuntimeError("a bug"), KeyError("x")])
def test_a_lookup_that_fails_is_a_miss_and_later_ones_work(service: ControlledService, error: Exception) -> None:
    with attached(service) as rig:
        service.fails["match"] = error
        assert rig.match(keys(2)).stored == NOTHING_STORED
        del service.fails["match"]
        if isinstance(error, StaleHolderError):
            again = rig.expect(Attached).attachment
            assert again.holder_id != rig.attachment.holder_id
            assert rig.client.attachment == again
        assert rig.match(keys(2), attempt=2).stored.chunk_count


@pytest.mark.parametrize("name", ["reserve", "commit", "abort", "drop", "release"])
@pytest.mark.parametrize("error", [unavailable(), refusal(), stale(), RuntimeError("a bug")])
def test_any_call_may_fail_in_any_way(service: ControlledService, name: str, error: Exception) -> None:
    loses = isinstance(error, ServiceUnavailableError | StaleHolderError)
    with attached(service) as rig:
        lease_id = rig.match(keys(1)).lease_id
        service.fails[name] = error
        call(rig, name, lease_id)
        if name == "reserve":
            assert rig.expect(ReserveFailed).run_id == 1
        if name == "commit":
            assert rig.expect(Committed) == Committed((), (number_key(0),))
        until(lambda: service.calls[name])
        service.fails.clear()
        if loses:
            assert rig.expect(Attached).attachment.holder_id != rig.attachment.holder_id
        else:
            assert rig.client.attachment == rig.attachment
        assert granted(reserve(rig, wish(2))[0]).keys == (number_key(2),)
        assert rig.match(keys(1), attempt=2).stored.chunk_count


def call(rig: Rig, name: str, lease_id: str = "lease") -> None:
    holder_id, epoch = rig.attachment.holder_id, rig.attachment.epoch
    extent = api.Extent(1, 0, 256, 9, 1)
    {
        "match": lambda: rig.client.match("r", 77, lambda: asked(keys(1)), time.monotonic() + 0.02),
        "release": lambda: rig.client.release((lease_id,)),
        "reserve": lambda: rig.client.reserve((wish(1),)),
        "commit": lambda: rig.client.settle(grant(holder_id, "grant", epoch=epoch), ((UNITS,),)),
        "abort": lambda: rig.client.settle(grant(holder_id, "grant", epoch=epoch), ((None,),), withheld=(0,)),
        "drop": lambda: rig.client.drop(number_key(1), extent, "mismatch"),
    }[name]()


def test_no_command_blocks_its_caller(service: ControlledService) -> None:
    names = ["match", "release", "reserve", "commit", "abort", "drop"]
    with attached(service) as rig:
        lease_id = rig.match(keys(1)).lease_id
        service.ignores_deadlines = True
        for name in (*names, "heartbeat", "attach"):
            service.holds[name] = threading.Event()
        times_s = []
        for _ in range(50):
            for name in names:
                started_s = time.perf_counter()
                call(rig, name, lease_id)
                rig.client.set_leases((lease_id,))
                rig.client.take_events()
                times_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        rig.client.attach_as(OTHER_IDENTITY)
        times_s.append(time.perf_counter() - started_s)
        # The median, because this machine may take the processor away from any one call.
        assert sorted(times_s)[len(times_s) // 2] < 0.001
        assert sorted(times_s)[len(times_s) * 95 // 100] < 0.02


def test_commands_that_pile_up_are_answered_without_the_service(
    service: ControlledService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every lookup and every wish gets its answer, and what was reserved before is settled yet."""
    monkeypatch.setattr("meshfusion.host.pool_client.MAX_FAST_COMMANDS", 2)
    monkeypatch.setattr("meshfusion.host.pool_client.MAX_SLOW_COMMANDS", 3)
    monkeypatch.setattr("meshfusion.host.pool_client.MAX_BEFORE_RESERVE", 1)
    with attached(service) as rig:
        (answered,) = reserve(rig, wish(1, 1, 2))
        run = granted(answered)
        service.ignores_deadlines = True
        held = {name: threading.Event() for name in ("match", "reserve")}
        service.holds.update(held)
        rig.client.reserve((wish(2),))
        until(lambda: len(service.calls["reserve"]) == 2)
        rig.client.reserve((wish(3),))
        rig.client.reserve((wish(4), wish(5)))
        assert [rig.expect(ReserveFailed).run_id for _ in range(2)] == [4, 5]
        extent = api.Extent(1, 0, 256, 9, 1)
        rig.client.drop(number_key(9), extent, "mismatch")
        rig.client.settle(run, ((UNITS, UNITS),))
        rig.client.settle(grant(rig.attachment.holder_id, "two"), ((UNITS,),))
        rig.client.settle(grant(rig.attachment.holder_id, "three"), ((UNITS,),))
        assert rig.expect(Committed) == Committed((), (number_key(0),)), "there is no room for the last"
        rig.client.settle(grant(rig.attachment.holder_id, "four"), ((None,),), withheld=(0,))

        rig.client.match("r", 1, lambda: asked(keys(2)), time.monotonic() + 5.0)
        until(lambda: service.calls["match"])
        for attempt in (2, 3, 4):
            rig.client.match("r", attempt, lambda: asked(keys(2)), time.monotonic() + 5.0)
        assert rig.expect(Matched) == Matched("r", 4, "", NOTHING_STORED)
        for hold in held.values():
            hold.set()
        assert rig.expect(Committed) == Committed(run.keys, ()), "what was reserved before it became too much"
        until(lambda: len(service.calls["match"]) == 3)
        assert service.calls["drop"] == []
        assert len(service.calls["reserve"]) == 3


def test_the_service_goes_away_and_comes_back(service: ControlledService) -> None:
    service.heartbeat_s = 0.02
    with attached(service) as rig:
        service.fails = dict.fromkeys(("attach", "match", "release", "reserve", "commit", "heartbeat"), unavailable())
        until(lambda: rig.client.attachment is None)
        started_s = time.monotonic()
        assert rig.match(keys(2)).stored == NOTHING_STORED
        assert reserve(rig, wish(1), wish(2)) == [ReserveFailed(1), ReserveFailed(2)]
        assert time.monotonic() - started_s < 1.0
        assert service.calls["reserve"] == []
        rig.client.settle(grant(rig.attachment.holder_id, "g"), ((UNITS,),))
        assert rig.expect(Committed) == Committed((), (number_key(0),))
        service.restart()
        service.fails.clear()
        again = rig.expect(Attached).attachment
        assert again.epoch == 2
        assert again.holder_id != rig.attachment.holder_id
        assert rig.match(keys(2), attempt=2).stored.chunk_count


def test_lost_leases_are_told(service: ControlledService) -> None:
    service.heartbeat_s = 0.02
    with attached(service) as rig:
        kept, lost = rig.match(keys(1)).lease_id, rig.match(keys(1), attempt=2).lease_id
        rig.client.set_leases((kept, lost))
        del service.leases[lost]
        assert rig.expect(LeasesLost).lease_ids == (lost,)


def test_trouble_of_an_earlier_incarnation_leaves_the_current_one_alone(service: ControlledService) -> None:
    with attached(service) as rig:
        service.restart()
        assert rig.match(keys(1)).stored == NOTHING_STORED  # stale: attaches again
        current = rig.expect(Attached).attachment
        rig.client.settle(grant(rig.attachment.holder_id, "old"), ((UNITS,),))
        assert rig.expect(Committed) == Committed((), (number_key(0),))
        assert rig.client.attachment == current
        assert rig.match(keys(1), attempt=2).stored.chunk_count


# ---- places --------------------------------------------------------------------------------------------------------


def test_places_commit_and_abort(service: ControlledService) -> None:
    with attached(service) as rig:
        first, second = reserve(rig, wish(1, 10, 11, 12, first_index=1), wish(2))
        assert first == Reserved(1, {api.ReserveOutcome.GRANTED: 3}, (), granted(first))
        assert granted(first) == GrantedRun(
            rig.attachment.holder_id,
            1,
            IDENTITY,
            (0, 1, 2),
            (number_key(10), number_key(11), number_key(12)),
            granted(first).grant_ids,
            ((1, 0, 256, 9, 1),) * 3,
            (ALONE,) * 3,
        )
        assert granted(second).keys == (number_key(2),)
        assert set(granted(first).grant_ids + granted(second).grant_ids) == set(service.grants)
        (request,) = service.calls["reserve"]
        assert [(item.key, item.position_tokens, item.token_count, item.shards) for item in request.items] == [
            (number_key(10), 64, CHUNK_TOKENS, (SHARD,)),
            (number_key(11), 128, CHUNK_TOKENS, (SHARD,)),
            (number_key(12), 192, CHUNK_TOKENS, (SHARD,)),
            (number_key(2), 0, CHUNK_TOKENS, (SHARD,)),
        ]
        rig.client.settle(granted(first), ((UNITS, None, UNITS),), withheld=(1,))
        assert rig.expect(Committed) == Committed((number_key(10), number_key(12)), ())
        (abort,), (commit,) = service.calls["abort"], service.calls["commit"]
        assert abort.grant_ids == granted(first).grant_ids[1:2]
        assert [item.grant_id for item in commit.items] == [granted(first).grant_ids[i] for i in (0, 2)]
        assert all(item.unit_digests == (UNITS,) for item in commit.items)
        assert set(service.grants) == set(granted(second).grant_ids)
        rig.client.settle(granted(first), ((UNITS, UNITS, UNITS),))
        assert rig.expect(Committed) == Committed((), granted(first).keys), "they are gone"


def test_a_place_in_doubt_is_neither_committed_nor_given_back(service: ControlledService) -> None:
    with attached(service) as rig:
        (answered,) = reserve(rig, wish(1, 1, 2, 3))
        run = granted(answered)
        rig.client.settle(run, ((UNITS, None, None),), withheld=(1, 2), in_doubt=(2,))
        assert len(rig.expect(Committed).visible_keys) == 1
        (abort,) = service.calls["abort"]
        assert (abort.grant_ids, abort.doubtful_grant_ids) == (run.grant_ids[1:2], run.grant_ids[2:])


def test_a_chunk_is_committed_with_what_each_rank_wrote_of_it(service: ControlledService) -> None:
    """The second rank has no shard of the second chunk: it reads that of the first."""
    with attached(service) as rig:
        run = grant(rig.attachment.holder_id, "one", "two", "three")
        others = (b"e" * 8,) * 4
        rig.client.settle(run, ((UNITS, UNITS, UNITS), (others, (), None)), withheld=(2,))
        rig.expect(Committed)
        (commit,), (abort,) = service.calls["commit"], service.calls["abort"]
        assert [item.unit_digests for item in commit.items] == [(UNITS, others), (UNITS,)]
        assert abort.grant_ids == ("three",)


def test_attaching_anew_is_another_incarnation_of_the_same_identity(service: ControlledService) -> None:
    with attached(service) as rig:
        rig.client.attach_anew(rig.attachment.holder_id)
        again = rig.expect(Attached).attachment
        rig.client.attach_anew(rig.attachment.holder_id)
        assert rig.client.attachment is again, "that has happened"
        assert again.holder_id != rig.attachment.holder_id
        assert service.holders[again.holder_id].identity == service.holders[rig.attachment.holder_id].identity


def test_a_run_may_get_part_of_what_it_asked_for(service: ControlledService) -> None:
    outcomes = [
        api.ReserveResult(api.ReserveOutcome.EXISTS),
        PLACE,
        api.ReserveResult(api.ReserveOutcome.NO_SPACE),
        api.ReserveResult(api.ReserveOutcome.BUSY),
        replace(PLACE, grant_id="g2"),
        api.ReserveResult(api.ReserveOutcome.NO_SPACE),
    ]
    with attached(service) as rig:
        service.reserve_reply = api.ReserveReply(tuple(outcomes))
        first, second = reserve(rig, wish(1, 0, 1, 2, 3, 4), wish(2))
        assert isinstance(first, Reserved)
        assert first.outcomes == {
            api.ReserveOutcome.EXISTS: 1,
            api.ReserveOutcome.GRANTED: 2,
            api.ReserveOutcome.NO_SPACE: 1,
            api.ReserveOutcome.BUSY: 1,
        }
        assert first.not_now == (2,)
        assert granted(first).indexes == (1, 4)
        assert granted(first).keys == (number_key(1), number_key(4))
        assert granted(first).grant_ids == ("g1", "g2")
        assert second == Reserved(2, {api.ReserveOutcome.NO_SPACE: 1}, (0,), None)


def raise_key_error() -> Any:
    raise KeyError("a bug")


def test_every_wish_is_answered_whatever_its_key(service: ControlledService) -> None:
    """Blocks stay pinned until the answer: none may be forgotten."""
    with attached(service) as rig:
        answers = reserve(rig, wish(1), wish(2, has_keys=False), wish(3), wish(4, identity=OTHER_IDENTITY))
        assert [isinstance(answer, Reserved) for answer in answers] == [True, False, True, False]
        answers = reserve(rig, wish(5), wish(6)._replace(keys_of=raise_key_error))
        assert [isinstance(answer, Reserved) for answer in answers] == [True, False]
        assert reserve(rig, wish(7, has_keys=False)) == [ReserveFailed(7)]
        mistaken = wish(9)._replace(groups=(0, 0), indexes=(0, 1))  # our own mistake: keys for one chunk
        answers = reserve(rig, wish(8), mistaken)
        assert all(isinstance(answer, ReserveFailed) for answer in answers)


def test_more_places_than_one_message_may_ask_for(service: ControlledService) -> None:
    with attached(service) as rig:
        wishes = [wish(i, *range(1500)) for i in range(4)] + [wish(4, *range(MAX_ITEMS)), wish(5)]
        assert all(isinstance(answer, Reserved) for answer in reserve(rig, *wishes))
        assert [len(request.items) for request in service.calls["reserve"]] == [3000, 3000, MAX_ITEMS, 1]


PLACE = api.ReserveResult(api.ReserveOutcome.GRANTED, "g1", (api.Extent(1, 0, 256, 9, 1),))


@pytest.mark.parametrize(
    "results",
    [
        (),
        (PLACE,),
        (PLACE,) * 3,
        (PLACE, replace(PLACE, extents=())),
        (PLACE, replace(PLACE, extents=PLACE.extents * 2)),
    ],
)
def test_places_that_do_not_fit_the_question_are_given_back(
    service: ControlledService, results: tuple[Any, ...]
) -> None:
    with attached(service) as rig:
        service.grants["g1"] = rig.attachment.holder_id
        service.reserve_reply = api.ReserveReply(results)
        assert reserve(rig, wish(1), wish(2)) == [ReserveFailed(1), ReserveFailed(2)]
        until(lambda: not results or not service.grants)


# ---- the real pool -------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    create_pool(tmp_path / "pool", size_bytes=8 << 20, segment_bytes=1 << 20)
    with Pool.open(tmp_path / "pool", PoolOptions(holder_silence_s=0.0, heartbeat_s=0.05)) as opened:
        yield opened


def commit_chunk(rig: Rig, save_id: int = 1) -> None:
    place = granted(reserve(rig, wish(save_id))[0])
    rig.client.settle(place, ((tuple(bytes([i] * 8) for i in range(4)),),))
    assert rig.expect(Committed) == Committed((number_key(save_id),), ())


def test_save_match_and_release_on_the_real_pool(pool: Pool) -> None:
    with attached(pool) as rig:
        assert rig.match((number_key(1),)).stored == NOTHING_STORED
        commit_chunk(rig)
        answer = rig.match((number_key(1), number_key(2)), attempt=2)
        assert stored_keys(answer) == (number_key(1),)
        assert answer.stored.groups[0].unit_digests == (tuple(bytes([i] * 8) for i in range(4)),)
        assert pool.status(deadline_s=1).lease_count == 1
        rig.client.release((answer.lease_id,))
        until(lambda: pool.status(deadline_s=1).lease_count == 0)
        rig.client.drop(number_key(1), answer.stored.groups[0].extents[0], "mismatch")
        until(lambda: pool.get_chunk(number_key(1), deadline_s=1) is None)


def test_another_identity_on_the_real_pool_sees_nothing_and_the_former_holder_is_fenced(pool: Pool) -> None:
    with attached(pool) as rig:
        commit_chunk(rig)
        answer = rig.match((number_key(1),))
        rig.client.attach_as(OTHER_IDENTITY)
        rig.client.release((answer.lease_id,))
        current = rig.expect(Attached).attachment
        assert rig.match((number_key(1),), attempt=2).stored == NOTHING_STORED
        until(lambda: pool.status(deadline_s=1).lease_count == 0)
        pool._holders.probe(time.monotonic())
        until(lambda: {h.holder_id for h in pool.status(deadline_s=1).holders} == {current.holder_id})


def test_closing_leaves_no_holder_lease_or_grant(tmp_path: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=8 << 20, segment_bytes=1 << 20)
    with Pool.open(tmp_path / "pool") as pool:
        statuses: list[api.PoolStatus] = []

        class Unclosed:
            """The client closes what it was given; this test still wants to look."""

            def __getattr__(self, name: str) -> Any:
                return getattr(pool, name)

            def close(self) -> None:
                statuses.append(pool.status(deadline_s=1))

        service: Any = Unclosed()
        with attached(service) as rig:
            commit_chunk(rig)
            rig.match((number_key(1),))
            reserve(rig, wish(2))
        (status,) = statuses
        assert (status.holders, status.lease_count, status.grant_count) == ((), 0, 0)
        assert status.committed_chunk_count == 1
