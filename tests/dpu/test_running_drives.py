"""Drives of a pool that is served: lost, back, exchanged, cut short, failing, added, drained, removed."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu import drive_admin, drives_keeper
from meshfusion.dpu import pool as pool_module
from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest, DriveStatus, RemoveDriveRequest
from meshfusion.dpu.api.types import Access, DropRequest, Extent, HeartbeatReply, HeartbeatRequest, ReserveOutcome
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.drive_look import Sighting, look_at
from meshfusion.dpu.pool import Pool, PoolOptions, check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.dpu.pool_tending import Policy
from meshfusion.dpu.running_drives import MOST_SUSPECTS, DriveOptions
from meshfusion.jbof.drives.health import LOG_BYTES, Warnings, parse_health
from meshfusion.jbof.drives.life_words import Fault
from meshfusion.jbof.drives.system.files import FileDrives
from meshfusion.jbof.epoch_record import EpochRecord, encode_epoch_record
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError, PoolBusyError, ServiceUnavailableError
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, SEGMENT_BYTES, SEGMENT_COUNT, SIZE_BYTES, Holder, key
from tests.host.support.waiting import until

FAST = DriveOptions(check_interval_s=0.02, probation_s=0.1, drain_s=0.0, window_s=0.2, look_deadline_s=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three drives: 0 in the pool's directory, 1 and 2 outside."""
    outside = [tmp_path / "one", tmp_path / "two"]
    for file in outside:
        blank(file)
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, *outside])
    return pool


@pytest.fixture
def sound(path: Path) -> Iterator[None]:
    """All chunks are what they were written as, in the end; to be asked for before the pool."""
    yield
    assert check_pool(path, lambda done, total: None).damaged == ()


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    everything = PoolOptions(policy=Policy.EVERYTHING)  # what is worth it does not matter here
    with Pool.open(path, everything, drive_options=FAST) as opened:
        yield opened


@pytest.fixture
def holder(pool: Pool) -> Iterator[Holder]:
    with Holder(pool) as attached:
        yield attached


def blank(file: Path) -> Path:
    file.touch()
    os.truncate(file, SIZE_BYTES)
    return file


def put(holder: Holder, first: int, count: int) -> dict[int, int]:
    """Full segments of chunks: on which drive each lies."""
    places = {}
    for i in range(first, first + count):
        result = holder.reserve(i, FULL_SEGMENT_UNITS)
        assert result.outcome is ReserveOutcome.GRANTED
        places[i] = drive_of_segment(result.extents[0].segment)
        assert holder.commit(result, holder.write(i, result))
    return places


def matched(holder: Holder, chunks: dict[int, int]) -> dict[int, int]:
    return {i: number for i, number in chunks.items() if holder.match_alone(i).chunks}


def without(chunks: dict[int, int], drive: int) -> dict[int, int]:
    return {i: number for i, number in chunks.items() if number != drive}


def status(pool: Pool, number: int) -> DriveStatus:
    return next(drive for drive in pool.drive_admin.drives(deadline_s=1) if drive.number == number)


def is_in(pool: Pool, number: int, state: str) -> Callable[[], bool]:
    return lambda: status(pool, number).state == state


def heartbeat(holder: Holder) -> HeartbeatReply:
    request = HeartbeatRequest(holder.id, holder.attachment.epoch, ())
    return holder.pool.heartbeat(request, deadline_s=DEADLINE_S)


def counter(pool: Pool, name: str) -> int:
    return dict(pool.status(deadline_s=DEADLINE_S).counters).get(name, 0)


def test_a_lost_drive_costs_its_hits_and_is_back_when_it_stays(
    sound: None, path: Path, pool: Pool, holder: Holder
) -> None:
    chunks = put(holder, 0, 9)
    assert set(chunks.values()) == {0, 1, 2}
    file = path.parent / "one"
    file.rename(path.parent / "elsewhere")
    until(is_in(pool, 1, "gone"), what="for the loss")
    assert matched(holder, chunks) == without(chunks, 1)
    assert status(pool, 1).problem.startswith(f"{file}: opening failed: No such file")
    assert (counter(pool, "drives_away"), counter(pool, "drive_alarms") > 0) == (1, True)
    assert 1 not in put(holder, 100, 6).values(), "saves go on, elsewhere"
    (path.parent / "elsewhere").rename(file)
    until(is_in(pool, 1, "online"), what="for the return")
    assert heartbeat(holder).drives_version > holder.attachment.drives_version
    holder.ask_again()
    assert set(without(matched(holder, chunks), 0).values()) >= {1}
    until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
    assert 1 in put(holder, 200, 6).values()


def test_what_was_granted_on_a_lost_drive_is_not_committed(path: Path, pool: Pool, holder: Holder) -> None:
    results = [(i, holder.reserve(i, FULL_SEGMENT_UNITS)) for i in range(4)]
    written = [(result, holder.write(i, result)) for i, result in results]
    (path.parent / "one").rename(path.parent / "elsewhere")
    until(is_in(pool, 1, "gone"), what="for the loss")
    for result, digests in written:
        on_lost = drive_of_segment(result.extents[0].segment) == 1
        assert holder.commit(result, digests) == (not on_lost)
    assert counter(pool, "grants_lost_with_drives") > 0
    assert pool.status(deadline_s=1).grant_count == 0


def test_a_copy_of_the_drive_is_used_and_told_to_engines(sound: None, path: Path, pool: Pool, holder: Holder) -> None:
    """Its content is the same and it is another file: what an engine has open is not the drive any more."""
    chunks = put(holder, 0, 6)
    file = path.parent / "one"
    shutil.copy(file, path.parent / "copy")
    (path.parent / "copy").rename(file)
    until(lambda: counter(pool, "drive_alarms") > 0, what="for the exchange")
    until(is_in(pool, 1, "online"), what="for the copy")
    assert 1 not in matched(holder, chunks).values(), "a miss until this engine has asked anew"
    assert 1 not in put(holder, 100, 3).values(), "nor is it written before all have"
    holder.ask_again()
    assert matched(holder, without(chunks, 0)) == without(chunks, 0)
    until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
    assert 1 in put(holder, 200, 6).values()


def test_a_host_of_a_target_need_not_hear_of_drives(path: Path, pool: Pool, holder: Holder) -> None:
    chunks = put(holder, 0, 6)
    file = path.parent / "one"
    file.rename(path.parent / "elsewhere")
    until(is_in(pool, 1, "gone"), what="for the loss")
    (path.parent / "elsewhere").rename(file)
    until(is_in(pool, 1, "online"), what="for the return")
    assert matched(holder, chunks) == without(chunks, 1)
    known = pool._store.holders.get(holder.id)
    assert known is not None
    known.record = replace(known.record, access=Access.NVMEOF)
    assert matched(holder, chunks) == chunks
    known.record = replace(known.record, access=Access.LOCAL)


@pytest.mark.parametrize("wrong", ["blank", "other", "short", "stale"])
def test_what_is_not_the_drive_is_not_touched(path: Path, pool: Pool, holder: Holder, wrong: str) -> None:
    chunks = put(holder, 0, 6)
    file = path.parent / "one"
    content = {
        "blank": bytes(SIZE_BYTES),
        "other": (path.parent / "two").read_bytes(),
        "short": file.read_bytes()[: SIZE_BYTES // 2],
        "stale": stale(file.read_bytes(), path),
    }[wrong]
    (path.parent / "new").write_bytes(content)
    (path.parent / "new").rename(file)
    until(is_in(pool, 1, "gone"), what="for the exchange")
    time.sleep(0.3)  # some rounds
    assert status(pool, 1).state == "gone"
    alarms = counter(pool, "drive_alarms")
    time.sleep(0.3)
    assert counter(pool, "drive_alarms") == alarms, "what stays as it is, is told once"
    assert matched(holder, chunks) == without(chunks, 1)
    put(holder, 100, 6)
    assert file.read_bytes() == content
    assert status(pool, 1).problem


def stale(content: bytes, path: Path) -> bytes:
    """As another service has left it, in a later epoch."""
    label = next(drive.label for drive in find_drives(PoolLayout(path)).here if drive.number == 1)
    record = EpochRecord(99, label.pool_uuid, label.drive_uuid)
    at = record.lba * 4096
    return content[:at] + encode_epoch_record(record) + content[at + 4096 :]


def test_an_epoch_of_another_service_stops_everything_on_the_drive(path: Path, pool: Pool, holder: Holder) -> None:
    chunks = put(holder, 0, 6)
    file = path.parent / "one"
    content = stale(file.read_bytes(), path)
    with file.open("r+b") as data:
        data.write(content[: 4 * 4096])
    until(is_in(pool, 1, "gone"), what="for the loss")
    assert status(pool, 1).reasons == ("another service took it over",)
    assert matched(holder, chunks) == without(chunks, 1)
    assert 1 not in put(holder, 100, 6).values()
    pool.drive_admin.drain_drive(DrainDriveRequest(1, is_ended=True), deadline_s=1)
    until(lambda: "another service has owned it" in status(pool, 1).problem, what="for the refusal")
    assert status(pool, 1).state == "gone", "the operator's word does not make it ours"


class Looks:
    """In the place of looks at one drive: ``answer`` with what a true one has seen; None: for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.answer: Callable[[Sighting], Sighting] | None = lambda sighting: sighting
        self.lbas: set[int] = set()
        self.end = threading.Event()
        self._name = name
        monkeypatch.setattr(drives_keeper, "look_at", self._look)

    def _look(self, path: Path, expected: Label | None, lbas: Sequence[int]) -> Sighting:
        sighting = look_at(path, expected, lbas)
        if path.name != self._name:
            return sighting
        self.lbas |= set(lbas)
        if self.answer is None:
            self.end.wait(30)
            return sighting
        return self.answer(sighting)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    found = Looks(monkeypatch, "one")
    yield found
    found.end.set()


@pytest.mark.parametrize("kind", ["errors", "hangs"])
def test_a_drive_that_fails_is_emptied_and_saves_go_elsewhere(
    looks: Looks, pool: Pool, holder: Holder, kind: str
) -> None:
    chunks = put(holder, 0, 6)
    if kind == "errors":
        looks.answer = lambda sighting: replace(sighting, fault=Fault.MEDIA, problem="EIO")
    else:
        looks.answer = None
    until(is_in(pool, 1, "failing"), what="for too many errors", limit_s=20.0)
    assert status(pool, 1).failed_command_count >= 3
    assert status(pool, 0).failed_command_count == 0
    assert status(pool, 0).read_latency_s > 0
    assert status(pool, 1).problem == ("EIO" if kind == "errors" else "it does not answer")
    until(lambda: matched(holder, chunks) == without(chunks, 1), what="for its chunks to go")
    assert 1 not in put(holder, 100, 6).values()
    looks.answer = lambda sighting: sighting
    looks.end.set()
    pool.drive_admin.drain_drive(DrainDriveRequest(1, is_ended=True), deadline_s=1)
    assert status(pool, 1).state == "online", "the operator trusts it again"


def test_a_slow_drive_is_read_and_not_written(looks: Looks, pool: Pool, holder: Holder) -> None:
    chunks = put(holder, 0, 6)
    looks.answer = lambda sighting: replace(sighting, latencies_s=tuple(1.0 for _ in sighting.latencies_s))
    until(is_in(pool, 1, "slow"), what="for three windows", limit_s=20.0)
    assert matched(holder, chunks) == chunks
    assert 1 not in put(holder, 100, 3).values()


def test_what_an_engine_could_not_read_is_looked_at(looks: Looks, pool: Pool, holder: Holder) -> None:
    put(holder, 0, 6)
    records = [pool.get_chunk(key(i), deadline_s=1) for i in range(6)]
    extents = [record.shards[0].extent for record in records if record is not None]
    extent = next(extent for extent in extents if extent.namespace == 2)
    i = extents.index(extent)
    pool.drop(DropRequest(holder.id, key(i), extent, "it cannot be read"), deadline_s=DEADLINE_S)
    until(lambda: extent.lba in looks.lbas, what="for a look there")
    assert status(pool, 1).state == "online", "it could be read"


def test_what_a_drive_says_of_itself_is_heeded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = bytearray(LOG_BYTES)
    page[0], page[3], page[4], page[5] = Warnings.READ_ONLY, 100, 10, 42
    health = parse_health(bytes(page))
    drives = {drive.where: drive for drive in FileDrives([path.parent / "one"]).discover().drives}
    (found,) = drives.values()
    told = {1: replace(found, health=health)}
    monkeypatch.setattr(pool_module, "read_health", lambda paths: told if 1 in paths else {})
    with Pool.open(path, drive_options=FAST) as pool, Holder(pool) as holder:
        until(is_in(pool, 1, "read_only"), what="for its health")
        assert status(pool, 1).percentage_used == 42
        assert (status(pool, 1).spare_percent, status(pool, 1).media_errors, status(pool, 1).written_bytes) == (
            100,
            0,
            0,
        )
        assert (status(pool, 0).spare_percent, status(pool, 0).media_errors, status(pool, 0).written_bytes) == (-1,) * 3
        assert pool._drives.shelf._drives[1].wear.percentage_used == 42
        assert 1 not in put(holder, 0, 6).values()


def test_a_drive_whose_openings_fail_stops_no_saves(
    pool: Pool, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = next(sought.open.file for sought in pool._drives.sought() if sought.number == 1 and sought.open)

    def refused(*_: object) -> None:
        raise DataFileError(MediaFault.READ_ONLY, "writing failed", Path("one"), errno_=30)

    with monkeypatch.context() as patch:
        patch.setattr(data._data, "write_from", refused)
        outcomes: list[ReserveOutcome | None] = []
        for i in range(6):
            try:
                outcomes.append(holder.reserve(i, FULL_SEGMENT_UNITS).outcome)
            except MediaError:
                outcomes.append(None)
        assert outcomes.count(None) == 1, "the one that met it"
        assert outcomes.count(ReserveOutcome.GRANTED) == 5
    assert (status(pool, 1).state, pool.status(deadline_s=1).saves_stopped_reason) == ("read_only", "")
    pool.drive_admin.drain_drive(DrainDriveRequest(1, is_ended=True), deadline_s=1)
    assert status(pool, 1).state == "online"


def test_a_drive_that_is_drained_is_emptied_and_then_removed(path: Path, pool: Pool, holder: Holder) -> None:
    chunks = put(holder, 0, 12)
    lease = holder.match(0)
    drive = chunks[0]
    assert lease.chunks
    pool.drive_admin.drain_drive(DrainDriveRequest(drive), deadline_s=1)
    listed = read_drive_list(path)
    assert listed is not None
    assert [one.number for one in listed.drives if one.is_draining] == [drive]
    until(lambda: counter(pool, "chunks_drained") == list(chunks.values()).count(drive), what="for its chunks to go")
    assert status(pool, drive).state == "draining", "a reader is there"
    with pytest.raises(PoolBusyError, match=f"drive {drive}"):
        pool.drive_admin.remove_drive(RemoveDriveRequest(drive), deadline_s=0.2)
    holder.release(lease)
    until(is_in(pool, drive, "drained"), what="for its end")
    assert matched(holder, chunks) == without(chunks, drive)
    assert drive not in put(holder, 100, 6).values()
    assert pool.drive_admin.remove_drive(RemoveDriveRequest(drive), deadline_s=5) == 0
    assert pool.drive_admin.remove_drive(RemoveDriveRequest(drive), deadline_s=5) == 0, "as often as you like"
    assert [one.number for one in pool.drive_admin.drives(deadline_s=1)] == sorted({0, 1, 2} - {drive})
    assert pool.status(deadline_s=1).segment_count == 2 * SEGMENT_COUNT
    put(holder, 200, 4)


def test_a_drain_can_be_taken_back(pool: Pool, holder: Holder) -> None:
    pool.drive_admin.drain_drive(DrainDriveRequest(1), deadline_s=1)
    until(is_in(pool, 1, "drained"), what="for its end")
    pool.drive_admin.drain_drive(DrainDriveRequest(1, is_ended=True), deadline_s=1)
    assert status(pool, 1).state == "online"
    holder.ask_again()
    until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
    assert 1 in put(holder, 0, 9).values()


def test_a_drive_that_its_budget_would_never_let_be_written_is_not_added(path: Path, tmp_path: Path) -> None:
    options = PoolOptions(drive_writes_per_day=0.7)  # at once 1.05 of six segments, or 0.7 of four
    small = SIZE_BYTES - 2 * SEGMENT_BYTES
    with Pool.open(path, options, drive_options=FAST) as pool:
        for data_path in ("", str(blank(tmp_path / "three"))):
            with pytest.raises(ConfigError, match="drive_writes_per_day"):
                pool.drive_admin.add_drive(AddDriveRequest(small, data_path), deadline_s=5)
        assert not any((tmp_path / "three").read_bytes()), "nothing was written"
        assert sorted(file.name for file in path.glob("data*")) == ["data"]
        assert pool.drive_admin.add_drive(AddDriveRequest(SIZE_BYTES), deadline_s=5).number == 3
    with Pool.open(path, options, drive_options=FAST) as pool:
        assert len(pool.drive_admin.drives(deadline_s=1)) == 4


def test_a_drive_is_added_while_engines_write(
    sound: None, path: Path, pool: Pool, holder: Holder, tmp_path: Path
) -> None:
    chunks = put(holder, 0, 6)
    request = AddDriveRequest(SIZE_BYTES, str(blank(tmp_path / "three")))
    added = pool.drive_admin.add_drive(request, deadline_s=5)
    assert (added.number, added.state, added.segment_count) == (3, "online", SEGMENT_COUNT)
    assert matched(holder, chunks) == chunks
    assert 3 not in put(holder, 100, 3).values(), "before the engine has heard of it"
    holder.ask_again()
    assert [namespace.nsid for namespace in holder.attachment.namespaces] == [1, 2, 3, 4]
    until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
    assert 3 in put(holder, 200, 6).values()
    with pytest.raises(ConfigError, match="is drive 3 of this pool"):
        pool.drive_admin.add_drive(request, deadline_s=5)
    inside = pool.drive_admin.add_drive(AddDriveRequest(2 * SIZE_BYTES), deadline_s=5)
    assert (inside.number, inside.path) == (4, str(path / "data.4"))


def test_a_drive_that_was_away_at_the_start_comes_back_with_its_chunks(path: Path) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        chunks = put(holder, 0, 9)
    (path.parent / "one").rename(path.parent / "elsewhere")
    with Pool.open(path, drive_options=FAST) as pool, Holder(pool) as holder:
        assert status(pool, 1).state == "gone"
        assert matched(holder, chunks) == without(chunks, 1)
        (path.parent / "elsewhere").rename(path.parent / "one")
        until(is_in(pool, 1, "online"), what="for the return")
        holder.ask_again()
        assert matched(holder, chunks) == chunks
        until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
        assert 1 in put(holder, 100, 4).values()
    with Pool.open(path) as pool, Holder(pool) as holder:
        assert matched(holder, chunks) == chunks


def test_what_the_administration_refuses(path: Path, pool: Pool, tmp_path: Path) -> None:
    admin = pool.drive_admin
    for number in (3, 200):
        with pytest.raises(ConfigError, match=f"no drive {number}"):
            admin.drain_drive(DrainDriveRequest(number), deadline_s=1)
        with pytest.raises(ConfigError, match=f"no drive {number}"):
            admin.remove_drive(RemoveDriveRequest(number), deadline_s=1)
    full = blank(tmp_path / "full")
    full.write_bytes(b"somebody's" + bytes(SIZE_BYTES))
    with pytest.raises(FormatError, match="not blank"):
        admin.add_drive(AddDriveRequest(SIZE_BYTES, str(full)), deadline_s=1)
    assert [drive.number for drive in admin.drives(deadline_s=1)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="index"):
        admin.add_drive(AddDriveRequest(1 << 60), deadline_s=1)
    admin.remove_drive(RemoveDriveRequest(1), deadline_s=1)
    admin.remove_drive(RemoveDriveRequest(2), deadline_s=1)
    with pytest.raises(ConfigError, match="the only one"):
        admin.remove_drive(RemoveDriveRequest(0), deadline_s=1)


def test_a_drive_whose_removal_failed_is_used_on(pool: Pool, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MediaError("no space for the list", next_step="free some")

    chunks = put(holder, 0, 6)
    with monkeypatch.context() as patch:
        patch.setattr(drive_admin, "write_drive_list", fail)
        with pytest.raises(MediaError, match="no space for the list"):
            pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=1)
    holder.ask_again()
    assert matched(holder, chunks) == chunks
    until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
    assert 1 in put(holder, 100, 6).values()


def test_a_service_that_ends_does_not_go_on_changing_drives(path: Path) -> None:
    pool = Pool.open(path, drive_options=FAST)
    holder = Holder(pool)
    chunks = put(holder, 0, 6)
    lease = holder.match(*range(6))
    assert lease.chunks
    drive = chunks[0]
    with ThreadPoolExecutor(1) as executor:
        removal = executor.submit(pool.drive_admin.remove_drive, RemoveDriveRequest(drive), deadline_s=DEADLINE_S)
        until(lambda: drive in pool._drives._leaving, what="for its begin")
        began_s = time.monotonic()
        pool.close()
        assert time.monotonic() - began_s < DEADLINE_S / 2
        with pytest.raises(PoolBusyError):
            removal.result()
    with pytest.raises(ServiceUnavailableError, match="ending"):
        pool.drive_admin.remove_drive(RemoveDriveRequest(drive), deadline_s=1)
    os.close(holder.lock)
    with Pool.open(path, drive_options=FAST) as again, Holder(again) as other:
        assert matched(other, chunks) == chunks


def test_what_engines_suspect_of_a_drive_that_hangs_is_bounded(path: Path) -> None:
    with Pool.open(path, drive_options=DriveOptions(check_interval_s=3600.0)) as pool, Holder(pool) as holder:
        for lba in range(2 * MOST_SUSPECTS):
            extent = Extent(1, 0, lba, 1, 1)
            assert not pool.drop(DropRequest(holder.id, key(0), extent, "digest"), deadline_s=DEADLINE_S)
        assert [len(suspects) for suspects in pool._drives.suspects.values()] == [MOST_SUSPECTS]


def test_a_removed_drive_is_anothers_to_have(path: Path, pool: Pool, tmp_path: Path) -> None:
    pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=1)
    other = tmp_path / "other"
    create_pool_of_drives(other, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None])
    with Pool.open(other, drive_options=FAST) as second:
        again = AddDriveRequest(SIZE_BYTES, str(path.parent / "one"), overwrite_serial="one")
        assert second.drive_admin.add_drive(again, deadline_s=5).state == "online"
        with pytest.raises(PoolBusyError):
            pool.drive_admin.add_drive(again, deadline_s=5)


def test_the_only_drive_is_watched_too(tmp_path: Path) -> None:
    create_pool_of_drives(tmp_path / "p", size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None])
    data = tmp_path / "p" / "data"
    with Pool.open(tmp_path / "p", drive_options=FAST) as pool, Holder(pool) as holder:
        assert holder.put(0)
        data.rename(tmp_path / "elsewhere")
        until(is_in(pool, 0, "gone"), what="for the loss")
        assert not holder.match(0).chunks
        assert holder.reserve(1).outcome is ReserveOutcome.NO_SPACE
        (tmp_path / "elsewhere").rename(data)
        until(is_in(pool, 0, "online"), what="for the return")
        holder.ask_again()
        assert holder.match(0).chunks
        until(lambda: counter(pool, "drives_only_read") == 0, what="for its writes")
        assert holder.put(1)
        assert pool.get_chunk(key(1), deadline_s=1) is not None


def test_a_drive_that_the_index_was_made_anew_without_is_not_used(path: Path) -> None:
    """To an index that does not know its segments all of them were never used: generations would come again."""
    with Pool.open(path) as pool, Holder(pool) as holder:
        chunks = put(holder, 0, 9)
    (path.parent / "one").rename(path.parent / "elsewhere")
    shutil.rmtree(path / "index")
    rebuild_index(path, lambda done, total: None)
    (path.parent / "elsewhere").rename(path.parent / "one")
    before = (path.parent / "one").read_bytes()
    with Pool.open(path, drive_options=FAST) as pool, Holder(pool) as holder:
        time.sleep(20 * FAST.check_interval_s + FAST.probation_s)
        assert status(pool, 1).state == "gone"
        assert "rebuild-index" in status(pool, 1).problem
        assert matched(holder, chunks) == without(chunks, 1)
        assert 1 not in put(holder, 100, 9).values()
    assert (path.parent / "one").read_bytes() == before
    rebuild_index(path, lambda done, total: None)
    with Pool.open(path, drive_options=FAST) as pool, Holder(pool) as holder:
        assert matched(holder, chunks).keys() >= chunks.keys() - without(chunks, 1).keys()
