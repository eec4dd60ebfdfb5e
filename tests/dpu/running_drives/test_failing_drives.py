"""Drives of a pool that is served: failing, slow, hanging, and what is made of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu import drives_keeper, pool_parts
from meshfusion.dpu.api.drive_types import DrainDriveRequest
from meshfusion.dpu.api.types import DropRequest, Extent, ReserveOutcome
from meshfusion.dpu.drive_look import Sighting, look_at
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.running_drives import MOST_SUSPECTS
from meshfusion.jbof.drives.health import LOG_BYTES, Warnings, parse_health
from meshfusion.jbof.drives.life_words import Fault
from meshfusion.jbof.drives.system.files import FileDrives
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from tests.dpu.pool_cases import DEADLINE_S, FULL_SEGMENT_UNITS, Holder, key
from tests.dpu.running_drives.cases import FAST, is_in, matched, put, status, without
from tests.host.support.waiting import until


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
    monkeypatch.setattr(pool_parts, "read_health", lambda paths: told if 1 in paths else {})
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


def test_what_engines_suspect_of_a_drive_that_hangs_is_bounded(path: Path) -> None:
    with Pool.open(path, drive_options=DriveOptions(check_interval_s=3600.0)) as pool, Holder(pool) as holder:
        for lba in range(2 * MOST_SUSPECTS):
            extent = Extent(1, 0, lba, 1, 1)
            assert not pool.drop(DropRequest(holder.id, key(0), extent, "digest"), deadline_s=DEADLINE_S)
        assert [len(suspects) for suspects in pool._drives.suspects.values()] == [MOST_SUSPECTS]
