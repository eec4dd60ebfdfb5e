"""Drives of a pool that is served: added, drained, removed."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshfusion.dpu import drive_admin
from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest, RemoveDriveRequest
from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError, PoolBusyError, ServiceUnavailableError
from tests.dpu.pool_cases import DEADLINE_S, SEGMENT_BYTES, SEGMENT_COUNT, SIZE_BYTES, Holder
from tests.dpu.running_drives.cases import FAST, blank, counter, is_in, matched, put, status, without
from tests.host.support.waiting import until


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


def test_a_removed_drive_is_anothers_to_have(path: Path, pool: Pool, tmp_path: Path) -> None:
    pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=1)
    other = tmp_path / "other"
    create_pool_of_drives(other, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None])
    with Pool.open(other, drive_options=FAST) as second:
        again = AddDriveRequest(SIZE_BYTES, str(path.parent / "one"), overwrite_serial="one")
        assert second.drive_admin.add_drive(again, deadline_s=5).state == "online"
        with pytest.raises(PoolBusyError):
            pool.drive_admin.add_drive(again, deadline_s=5)


def test_a_change_waits_for_another_no_longer_than_its_caller(pool: Pool) -> None:
    with pool.drive_admin._changes:
        began_s = time.monotonic()
        with pytest.raises(ServiceUnavailableError, match="another change of the pool's drives"):
            pool.drive_admin.drain_drive(DrainDriveRequest(1), deadline_s=0.2)
        assert 0.2 <= time.monotonic() - began_s < 5
    assert pool.drive_admin.drain_drive(DrainDriveRequest(1), deadline_s=DEADLINE_S).state == "draining"
