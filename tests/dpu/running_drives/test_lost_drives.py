"""Drives of a pool that is served: lost, back, exchanged, cut short, another's."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu import drives_keeper
from meshfusion.dpu.api.drive_types import DrainDriveRequest
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.drive_return import take_back
from meshfusion.dpu.index import Index
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.dpu.running_drives import RunningDrives, Sought
from meshfusion.jbof.drives.life_words import Reason
from meshfusion.jbof.epoch_record import EpochRecord, encode_epoch_record
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.pool_cases import FULL_SEGMENT_UNITS, SEGMENT_BYTES, SIZE_BYTES, Holder, key
from tests.dpu.running_drives.cases import FAST, counter, heartbeat, is_in, matched, put, status, without
from tests.host.support.waiting import until


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


def test_a_service_without_descriptors_loses_no_drive(
    path: Path, pool: Pool, holder: Holder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers may use them up, also such as nobody knows."""
    chunks = put(holder, 0, 3)
    with monkeypatch.context() as patched:
        open_, exhausted = os.open, OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def refuse(file: str | Path, *arguments: Any, **more: Any) -> int:
            if threading.current_thread().name.startswith("meshfusion-look"):
                raise exhausted
            return open_(file, *arguments, **more)

        patched.setattr(os, "open", refuse)
        for number in range(3):
            until(lambda number=number: f"drive {number} could not be looked at" in caplog.text)  # type: ignore[misc]
        assert "Too many open files" in caplog.text
        assert matched(holder, chunks) == chunks
        assert all(status(pool, number).state == "online" for number in range(3))
    (path.parent / "one").rename(path.parent / "elsewhere")
    until(is_in(pool, 1, "gone"), what="for a true loss")


class Checks:
    """In the place of the checks of drives that are back: each waits for :attr:`may_go`, and then fails with
    :attr:`error`, or is a true one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.error: MediaError | None = None
        self.count = 0
        monkeypatch.setattr(drives_keeper, "take_back", self._check)

    def _check(self, sought: Sought, drives: RunningDrives, index: Index, mutex: threading.Lock) -> None:
        assert self.may_go.wait(30)
        self.count += 1
        if self.error is not None:
            raise self.error
        take_back(sought, drives, index, mutex)


def test_what_is_told_of_a_drive_that_is_back_is_of_its_return(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks, file = Checks(monkeypatch), path.parent / "one"
    with Pool.open(path, drive_options=replace(FAST, probation_s=2.0)) as pool:
        file.rename(path.parent / "elsewhere")
        until(lambda: "No such file" in status(pool, 1).problem, what="for the loss")
        assert status(pool, 1).reasons == (Reason.ABSENT.value,)
        (path.parent / "elsewhere").rename(file)
        until(lambda: status(pool, 1).reasons != (Reason.ABSENT.value,), what="for the return")
        assert (status(pool, 1).reasons, status(pool, 1).problem) == ((Reason.UNCHECKED.value,), "")

        checks.error = MediaError("it answers with nonsense", next_step="mend it")
        checks.may_go.set()
        until(lambda: checks.count >= 5, what="for checks")
        assert status(pool, 1).reasons == (Reason.REFUSED.value,)
        assert (status(pool, 1).state, status(pool, 1).problem) == ("gone", "it answers with nonsense")
        assert caplog.text.count("nonsense") == 1
        checks.error = MediaError("it answers with less", next_step="mend it")
        so_far = checks.count
        until(lambda: checks.count >= so_far + 5, what="for more checks")
        assert (status(pool, 1).problem, caplog.text.count("with less")) == ("it answers with less", 1)

        checks.error = None
        until(lambda: status(pool, 1).reasons == (Reason.PROBATION.value,), what="for a check that passes")
        assert status(pool, 1).problem == ""
        until(is_in(pool, 1, "online"), what="for its trust")
        assert (status(pool, 1).reasons, status(pool, 1).problem) == ((), "")


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
