"""The pool client against a service that misbehaves, and against the real pool."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import create_liveness, hold_liveness, take_liveness_away
from meshfusion.dpu.pool import Pool, PoolOptions, create_pool
from meshfusion.host import pool_client
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import Attached, Committed, Event, LeasesLost, Matched, Reserved, ReserveWish
from meshfusion.jbof.errors import MediaError, ServiceUnavailableError, StaleHolderError
from tests.host.support.chunk_records import make_records, number_key
from tests.host.support.controlled_service import ControlledService, refusal, stale, unavailable
from tests.host.support.waiting import until

IDENTITY = b"\x11" * 32
OTHER_IDENTITY = b"\x22" * 32
CHUNK_TOKENS = 64
SHARD = api.ShardSize(0, 32_768, 4)
E = TypeVar("E")


@pytest.fixture(autouse=True)
def _quick_reattach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "REATTACH_FIRST_S", 0.01)
    monkeypatch.setattr(pool_client, "REATTACH_MAX_S", 0.05)


def make_client(service: api.ChunkService) -> PoolClient:
    return PoolClient(service, identity=IDENTITY, engine_version="0.32.0", chunk_tokens=CHUNK_TOKENS, shard=SHARD)


class Rig:
    def __init__(self, service: api.ChunkService) -> None:
        self.client = make_client(service)
        self.attachment = self.client.start()
        self.events: list[Event] = []

    def expect(self, kind: type[E], match: Callable[[E], bool] = lambda event: True) -> E:
        """The next event of ``kind``; others stay."""

        def look() -> E | None:
            self.events += self.client.take_events()
            for event in self.events:
                if isinstance(event, kind) and match(event):
                    self.events.remove(event)
                    return event
            return None

        found = until(look, what=f"for {kind.__name__}")
        assert found is not None
        return found

    def match(self, keys: tuple[bytes, ...] | None, *, attempt: int = 1, deadline_s: float = 5.0) -> Matched:
        self.client.match("r", attempt, lambda: keys, time.monotonic() + deadline_s)
        return self.expect(Matched, lambda event: event.attempt == attempt)


@pytest.fixture
def service(tmp_path: Path) -> ControlledService:
    made = ControlledService(tmp_path)
    made.chunks = {c.key: c for c in make_records(3, block_tokens=16, blocks_per_chunk=4, identity=IDENTITY)}
    return made


@contextlib.contextmanager
def attached(service: api.ChunkService) -> Iterator[Rig]:
    rig = Rig(service)
    try:
        first = rig.expect(Attached)
        assert first.attachment == rig.attachment
        yield rig
    finally:
        if isinstance(service, ControlledService):
            service.fails.clear()
            for hold in service.holds.values():
                hold.set()
        rig.client.close()


def keys(count: int) -> tuple[bytes, ...]:
    return tuple(number_key(i) for i in range(count))


def wish(save_id: int, key: bytes | None = b"", *, identity: bytes = IDENTITY, position: int = 0) -> ReserveWish:
    return ReserveWish(
        save_id, identity, lambda: number_key(save_id) if key == b"" else key, position, CHUNK_TOKENS, SHARD
    )


# ---- lookups -------------------------------------------------------------------------------------------------------


def test_a_hit_carries_the_lease_and_the_stored_prefix(service: ControlledService) -> None:
    with attached(service) as rig:
        answer = rig.match((*keys(2), b"x" * 32, number_key(2)))
        assert [chunk.key for chunk in answer.chunks] == list(keys(2))
        assert answer.lease_id in service.leases
        (request,) = service.calls["match"]
        assert (request.holder_id, request.request_id, request.group) == (rig.attachment.holder_id, "r", 0)
        assert request.chunk_tokens == CHUNK_TOKENS
        rig.client.release((answer.lease_id,))
        until(lambda: not service.leases)


@pytest.mark.parametrize("wanted", [(b"x" * 32,), (), None])
def test_a_miss_whatever_the_reason(service: ControlledService, wanted: tuple[bytes, ...] | None) -> None:
    with attached(service) as rig:
        answer = rig.match(wanted)
        assert (answer.lease_id, answer.chunks) == ("", ())
        assert len(service.calls["match"]) == (1 if wanted else 0)


def test_a_lookup_that_waited_past_its_deadline_is_a_miss_without_asking(service: ControlledService) -> None:
    with attached(service) as rig:
        assert rig.match(keys(2), deadline_s=-0.001).chunks == ()
        assert service.calls["match"] == []


def test_a_lookup_whose_keys_cannot_be_made_is_answered_too(service: ControlledService) -> None:
    with attached(service) as rig:
        rig.client.match("r", 1, raise_key_error, time.monotonic() + 5)  # type: ignore[arg-type]
        assert rig.expect(Matched) == Matched("r", 1, "", ())


def test_a_slow_service_holds_up_no_later_lookup_for_long(service: ControlledService) -> None:
    with attached(service) as rig:
        service.holds["match"] = threading.Event()  # hangs until the deadline it is given
        started_s = time.monotonic()
        deadline_s = started_s + 0.02
        for attempt in range(5):
            rig.client.match("r", attempt, lambda: keys(2), deadline_s)
        for attempt in range(5):
            assert rig.expect(Matched, lambda e, a=attempt: e.attempt == a).chunks == ()  # type: ignore[misc]
        assert time.monotonic() - started_s < 1.0
        assert len(service.calls["match"]) == 1  # the others were past their deadline when their turn came
        assert rig.client.attachment == rig.attachment  # merely slow: no reason to let go
        del service.holds["match"]
        assert rig.match(keys(2), attempt=9).chunks


def test_an_answer_that_comes_a_little_late_still_carries_its_lease(service: ControlledService) -> None:
    with attached(service) as rig:
        service.holds["match"] = threading.Event()
        threading.Timer(0.1, service.holds["match"].set).start()
        answer = rig.match(keys(2), deadline_s=0.02)
        assert answer.lease_id in service.leases  # the state machine gives it back: test_lookups
        rig.client.release((answer.lease_id,))
        until(lambda: not service.leases)


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
def test_what_was_not_asked_for_is_cut_off(service: ControlledService, lie: api.ChunkRecord) -> None:
    with attached(service) as rig:
        service.match_chunks = (FIRST, lie)
        answer = rig.match(keys(2))
        assert answer.chunks == (FIRST,)
        assert answer.lease_id
        service.match_chunks = (lie,)
        assert rig.match(keys(2), attempt=2).chunks == ()


def test_more_chunks_than_asked_for(service: ControlledService) -> None:
    with attached(service) as rig:
        service.match_chunks = (FIRST, SECOND)
        assert rig.match(keys(1)).chunks == (FIRST,)


# ---- trouble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [unavailable(), refusal(), stale(), RuntimeError("a bug"), KeyError("x")])
def test_a_lookup_that_fails_is_a_miss_and_later_ones_work(service: ControlledService, error: Exception) -> None:
    with attached(service) as rig:
        service.fails["match"] = error
        assert rig.match(keys(2)).chunks == ()
        del service.fails["match"]
        if isinstance(error, StaleHolderError):
            again = rig.expect(Attached).attachment
            assert again.holder_id != rig.attachment.holder_id
            assert rig.client.attachment == again
        assert rig.match(keys(2), attempt=2).chunks


@pytest.mark.parametrize("name", ["reserve", "commit", "abort", "drop", "release"])
@pytest.mark.parametrize("error", [unavailable(), refusal(), stale(), RuntimeError("a bug")])
def test_any_call_may_fail_in_any_way(service: ControlledService, name: str, error: Exception) -> None:
    loses = isinstance(error, ServiceUnavailableError | StaleHolderError)
    with attached(service) as rig:
        lease_id = rig.match(keys(1)).lease_id
        service.fails[name] = error
        call(rig, name, lease_id)
        if name == "reserve":
            assert rig.expect(Reserved).results is None
        if name == "commit":
            assert rig.expect(Committed) == Committed(0, 1)
        until(lambda: service.calls[name])
        service.fails.clear()
        if loses:
            assert rig.expect(Attached).attachment.holder_id != rig.attachment.holder_id
        else:
            assert rig.client.attachment == rig.attachment
        rig.client.reserve((wish(2),))
        assert rig.expect(Reserved, lambda e: e.save_ids == (2,)).results is not None
        assert rig.match(keys(1), attempt=2).chunks


def call(rig: Rig, name: str, lease_id: str = "lease") -> None:
    holder_id, epoch = rig.attachment.holder_id, rig.attachment.epoch
    item = api.CommitItem("grant", ((b"d" * 8,),))
    extent = api.Extent(1, 0, 256, 9, 1)
    {
        "match": lambda: rig.client.match("r", 77, lambda: keys(1), time.monotonic() + 0.02),
        "release": lambda: rig.client.release((lease_id,)),
        "reserve": lambda: rig.client.reserve((wish(1),)),
        "commit": lambda: rig.client.commit(holder_id, epoch, (item,)),
        "abort": lambda: rig.client.abort(holder_id, epoch, ("grant",)),
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
                rig.client.release_former_holders(rig.attachment.holder_id)
                times_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        rig.client.attach_as(OTHER_IDENTITY)
        times_s.append(time.perf_counter() - started_s)
        # The median, because this machine may take the processor away from any one call.
        assert sorted(times_s)[len(times_s) // 2] < 0.001
        assert sorted(times_s)[len(times_s) * 95 // 100] < 0.02


def test_the_service_goes_away_and_comes_back(service: ControlledService) -> None:
    service.heartbeat_s = 0.02
    with attached(service) as rig:
        service.fails = dict.fromkeys(("attach", "match", "release", "reserve", "commit", "heartbeat"), unavailable())
        until(lambda: rig.client.attachment is None)
        started_s = time.monotonic()
        assert rig.match(keys(2)).chunks == ()
        rig.client.reserve((wish(1), wish(2)))
        refused = rig.expect(Reserved)
        assert (refused.save_ids, refused.results) == ((1, 2), None)
        assert time.monotonic() - started_s < 1.0
        assert service.calls["reserve"] == []
        rig.client.commit(rig.attachment.holder_id, 1, (api.CommitItem("g", ((b"d" * 8,),)),))
        assert rig.expect(Committed) == Committed(0, 1)
        service.restart()
        service.fails.clear()
        again = rig.expect(Attached).attachment
        assert again.epoch == 2
        assert again.holder_id != rig.attachment.holder_id
        assert rig.match(keys(2), attempt=2).chunks


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
        assert rig.match(keys(1)).chunks == ()  # stale: attaches again
        current = rig.expect(Attached).attachment
        rig.client.commit(rig.attachment.holder_id, 1, (api.CommitItem("old", ((b"d" * 8,),)),))
        assert rig.expect(Committed) == Committed(0, 1)
        assert rig.client.attachment == current
        assert rig.match(keys(1), attempt=2).chunks


# ---- places --------------------------------------------------------------------------------------------------------


def test_places_commit_and_abort(service: ControlledService) -> None:
    with attached(service) as rig:
        rig.client.reserve((wish(1), wish(2, position=64)))
        reserved = rig.expect(Reserved)
        assert reserved.save_ids == (1, 2)
        assert reserved.keys == (number_key(1), number_key(2))
        assert (reserved.holder_id, reserved.epoch, reserved.identity) == (rig.attachment.holder_id, 1, IDENTITY)
        assert reserved.results is not None
        (request,) = service.calls["reserve"]
        assert [(item.key, item.position_tokens, item.token_count, item.shards) for item in request.items] == [
            (number_key(1), 0, CHUNK_TOKENS, (SHARD,)),
            (number_key(2), 64, CHUNK_TOKENS, (SHARD,)),
        ]
        first, second = (result.grant_id for result in reserved.results)
        rig.client.abort(reserved.holder_id, reserved.epoch, (first,))
        items = (api.CommitItem(first, ((b"d" * 8,),)), api.CommitItem(second, ((b"d" * 8,),)))
        rig.client.commit(reserved.holder_id, reserved.epoch, items)
        assert rig.expect(Committed) == Committed(1, 1)
        assert not service.grants


def raise_key_error() -> bytes:
    raise KeyError("a bug")


def test_every_wish_is_answered_whatever_its_key(service: ControlledService) -> None:
    """Blocks stay pinned until the answer: none may be forgotten."""
    with attached(service) as rig:
        rig.client.reserve((wish(1), wish(2, None), wish(3), wish(4, identity=OTHER_IDENTITY)))
        assert rig.expect(Reserved, lambda e: e.results is not None).save_ids == (1, 3)
        assert rig.expect(Reserved, lambda e: e.results is None).save_ids == (2, 4)
        rig.client.reserve((wish(5), replace(wish(6), key_of=raise_key_error)))
        refused = rig.expect(Reserved)
        assert (refused.save_ids, refused.results) == ((5, 6), None)
        rig.client.reserve((wish(7, None),))
        assert rig.expect(Reserved).results is None


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
        rig.client.reserve((wish(1), wish(2)))
        refused = rig.expect(Reserved)
        assert (refused.save_ids, refused.results) == ((1, 2), None)
        until(lambda: not results or not service.grants)


# ---- identities and incarnations -----------------------------------------------------------------------------------


def test_another_identity_is_another_incarnation(service: ControlledService) -> None:
    with attached(service) as rig:
        lease_id = rig.match(keys(2)).lease_id
        rig.client.release((lease_id,))  # as the scheduler's reset does, just before
        rig.client.attach_as(OTHER_IDENTITY)
        assert rig.match(keys(2), attempt=2).chunks == ()
        again = rig.expect(Attached).attachment
        assert service.holders[again.holder_id].identity == OTHER_IDENTITY
        until(lambda: not service.leases, what="for a lease to be released by the holder that got it")
        assert rig.match(keys(2), attempt=3).chunks == ()  # these chunks are of the former identity
        rig.client.reserve((wish(1), wish(2, identity=OTHER_IDENTITY)))
        assert rig.expect(Reserved, lambda e: e.results is not None).save_ids == (2,)


def test_an_attachment_that_comes_after_the_identity_changed_is_given_back(service: ControlledService) -> None:
    with attached(service) as rig:
        service.holds["attach"] = threading.Event()
        rig.client.attach_as(OTHER_IDENTITY)
        until(lambda: len(service.calls["attach"]) == 2)
        third = b"\x33" * 32
        rig.client.attach_as(third)
        service.holds["attach"].set()
        again = rig.expect(Attached).attachment
        assert service.holders[again.holder_id].identity == third
        given_back = service.calls["attach"][1].incarnation
        assert given_back not in service.holders
        assert take_liveness_away(service.directory / f"{given_back}.alive")


def test_earlier_incarnations_can_be_fenced_once_workers_have_left_them(service: ControlledService) -> None:
    with attached(service) as rig:
        former = rig.attachment
        worker = hold_liveness(Path(former.liveness_path))
        service.restart()
        rig.match(keys(1))
        current = rig.expect(Attached).attachment
        assert not take_liveness_away(Path(former.liveness_path)), "its workers may still write"
        rig.client.release_former_holders(former.holder_id)  # a late report of the workers: not there yet
        assert not take_liveness_away(Path(current.liveness_path))
        rig.client.release_former_holders("nobody")
        assert not take_liveness_away(Path(current.liveness_path))
        rig.client.release_former_holders(current.holder_id)
        assert not take_liveness_away(Path(former.liveness_path)), "the worker itself still holds it"
        os.close(worker)
        assert take_liveness_away(Path(former.liveness_path))
        assert not take_liveness_away(Path(current.liveness_path))


def test_a_liveness_file_out_of_reach_at_start_is_an_error_and_leaves_nothing(service: ControlledService) -> None:
    client = make_client(service)
    service.directory = service.directory / "elsewhere"
    service.directory.mkdir()
    real_attach = service.attach

    def attach_far_away(request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        return replace(real_attach(request, deadline_s=deadline_s), liveness_path="/nowhere/x.alive")

    service.attach = attach_far_away  # type: ignore[method-assign]
    with pytest.raises(MediaError):
        client.start()
    assert not service.holders
    client.close()  # the engine shuts a half-started connector down
    assert service.is_closed


@pytest.mark.parametrize("error", [unavailable(), refusal(), RuntimeError("a bug")])
def test_trouble_at_start_is_the_engines_to_hear(service: ControlledService, error: Exception) -> None:
    service.fails["attach"] = error
    client = make_client(service)
    with pytest.raises(type(error)):
        client.start()
    client.close()


def test_a_bug_while_attaching_again_does_not_end_the_attempts(service: ControlledService) -> None:
    with attached(service) as rig:
        service.fails["attach"] = RuntimeError("a bug")
        service.restart()
        rig.match(keys(1))
        until(lambda: len(service.calls["attach"]) > 3)
        service.fails.clear()
        rig.expect(Attached)


def test_closing_detaches_and_frees_the_liveness_lock(service: ControlledService) -> None:
    with attached(service) as rig:
        rig.client.close()
        assert not service.holders
        assert service.is_closed
        assert take_liveness_away(Path(rig.attachment.liveness_path))
        assert not [t for t in threading.enumerate() if t.name.startswith("meshfusion-") and t in rig.client._threads]
        service.calls["detach"].clear()
    assert service.calls["detach"] == []  # closed again by the fixture: nothing left to do


@pytest.mark.parametrize("patience_s", [2.0, 0.01])
def test_closing_while_an_attachment_is_being_made(
    service: ControlledService, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(pool_client, "CLOSE_DEADLINE_S", patience_s)
    with attached(service) as rig:
        service.holds["attach"] = threading.Event()
        service.restart()
        rig.match(keys(1))
        until(lambda: len(service.calls["attach"]) == 2)
        timer = threading.Timer(0.1, service.holds["attach"].set)
        timer.start()
        rig.client.close()
        timer.join()
        late = service.calls["attach"][1].incarnation
        until(lambda: late in service.former, what="for the late attachment to be given back")
        assert take_liveness_away(service.directory / f"{late}.alive")


def test_queued_commits_are_carried_out_before_closing(service: ControlledService) -> None:
    with attached(service) as rig:
        for i in range(20):
            service.grants[f"g{i}"] = rig.attachment.holder_id
            rig.client.commit(rig.attachment.holder_id, 1, (api.CommitItem(f"g{i}", ((b"d" * 8,),)),))
        rig.client.close()
        assert not service.grants


# ---- liveness files ------------------------------------------------------------------------------------------------


def test_liveness_of_two_processes_of_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "h.alive"
    create_liveness(path)
    first, second = hold_liveness(path), hold_liveness(path)
    assert not take_liveness_away(path)
    os.close(first)
    assert not take_liveness_away(path)
    os.close(second)
    assert take_liveness_away(path)
    assert take_liveness_away(path)  # gone is gone
    with pytest.raises(MediaError, match="fenced"):
        hold_liveness(path)


def test_liveness_out_of_reach_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MediaError, match="out of reach"):
        hold_liveness(tmp_path / "file" / "h.alive")


# ---- the real pool -------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    create_pool(tmp_path / "pool", size_bytes=8 << 20, segment_bytes=1 << 20)
    with Pool.open(tmp_path / "pool", PoolOptions(holder_silence_s=0.0, heartbeat_s=0.05)) as opened:
        yield opened


def commit_chunk(rig: Rig, save_id: int = 1) -> None:
    rig.client.reserve((wish(save_id),))
    reserved = rig.expect(Reserved)
    assert reserved.results is not None
    item = api.CommitItem(reserved.results[0].grant_id, (tuple(bytes([i] * 8) for i in range(4)),))
    rig.client.commit(reserved.holder_id, reserved.epoch, (item,))
    assert rig.expect(Committed) == Committed(1, 0)


def test_save_match_and_release_on_the_real_pool(pool: Pool) -> None:
    with attached(pool) as rig:
        assert rig.match((number_key(1),)).chunks == ()
        commit_chunk(rig)
        answer = rig.match((number_key(1), number_key(2)), attempt=2)
        (chunk,) = answer.chunks
        assert chunk.shards[0].unit_digests == tuple(bytes([i] * 8) for i in range(4))
        assert pool.status(deadline_s=1).lease_count == 1
        rig.client.release((answer.lease_id,))
        until(lambda: pool.status(deadline_s=1).lease_count == 0)
        rig.client.drop(chunk.key, chunk.shards[0].extent, "mismatch")
        until(lambda: pool.get_chunk(chunk.key, deadline_s=1) is None)


def test_another_identity_on_the_real_pool_sees_nothing_and_the_former_holder_is_fenced(pool: Pool) -> None:
    with attached(pool) as rig:
        commit_chunk(rig)
        answer = rig.match((number_key(1),))
        rig.client.attach_as(OTHER_IDENTITY)
        rig.client.release((answer.lease_id,))
        current = rig.expect(Attached).attachment
        assert rig.match((number_key(1),), attempt=2).chunks == ()
        until(lambda: pool.status(deadline_s=1).lease_count == 0)
        pool._probe_holders(time.monotonic())
        assert {h.holder_id for h in pool.status(deadline_s=1).holders} >= {rig.attachment.holder_id}
        rig.client.release_former_holders(current.holder_id)
        pool._probe_holders(time.monotonic())
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
            rig.client.reserve((wish(2),))
            rig.expect(Reserved)
        (status,) = statuses
        assert (status.holders, status.lease_count, status.grant_count) == ((), 0, 0)
        assert status.committed_chunk_count == 1
