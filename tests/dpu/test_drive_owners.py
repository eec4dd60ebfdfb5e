"""One owner per drive: a pool whose drives know reservations, and two machines that have its directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api.drive_types import RemoveDriveRequest
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.drive_owners import DriveOwners, OpenReservable, Reservable, open_block_reservable, service_id
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.drives.ownership import DriveOwnedError
from meshfusion.jbof.errors import FormatError, MediaError, UnsupportedError
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES, Holder
from tests.host.support.waiting import until
from tests.jbof.drives.shared_drive import DriveAsHost, SharedDrive

FAST = DriveOptions(check_interval_s=0.02, probation_s=0.1, health_interval_s=0.05)


class ClosableHost(DriveAsHost):
    def close(self) -> None:
        pass


class Shelf:
    """Drives that two machines reach: by the names of their files."""

    def __init__(self) -> None:
        self.drives = {name: SharedDrive() for name in ("data", "data.1")}

    def seen_by(self, machine: str) -> OpenReservable:
        def opened(path: Path) -> Reservable:
            host = ClosableHost(self.drives[path.name], machine)
            return Reservable(host, host)

        return opened

    @property
    def holders(self) -> list[str | None]:
        return [drive.holder for drive in self.drives.values()]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    create_pool_of_drives(path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, None])
    return path


@pytest.fixture
def other(path: Path, tmp_path: Path) -> Path:
    """What another machine has of it: the same drives under other paths, and a directory of its own."""
    other = tmp_path / "other"
    shutil.copytree(path, other)
    listed = (other / "drives").read_text().replace(str(path), str(other))
    (other / "drives").write_text(listed)
    return other


@pytest.fixture
def pool(path: Path, shelf: Shelf) -> Iterator[Pool]:
    with Pool.open(path, drive_options=FAST, open_reservable=shelf.seen_by("A")) as pool:
        yield pool


def test_the_drives_of_a_service_are_its_own(other: Path, pool: Pool, shelf: Shelf) -> None:
    assert shelf.holders == ["A", "A"]
    with pytest.raises(DriveOwnedError) as refused:
        Pool.open(other, open_reservable=shelf.seen_by("B"))
    assert "--takeover" in refused.value.next_step
    assert [list(drive.keys) for drive in shelf.drives.values()] == [["A"], ["A"]], "nothing is left of it"
    with Holder(pool) as holder:
        assert holder.put(0)


def test_a_takeover_stops_the_former_owner_and_is_told(other: Path, pool: Pool, shelf: Shelf) -> None:
    with Holder(pool) as holder, Pool.open(other, open_reservable=shelf.seen_by("B"), may_take_over=True):
        assert shelf.holders == ["B", "B"]
        until(lambda: all(drive.state == "gone" for drive in pool.drive_admin.drives(deadline_s=1)))
        assert pool.drive_admin.drives(deadline_s=1)[0].reasons == ("another service took it over",)
        assert holder.reserve(0).outcome is ReserveOutcome.NO_SPACE
    assert shelf.holders == ["B", "B"]


def test_after_an_orderly_end_nobody_has_to_allow_it(path: Path, other: Path, shelf: Shelf) -> None:
    Pool.open(path, open_reservable=shelf.seen_by("A")).close()
    assert all(drive.record is not None and drive.record.is_clean for drive in shelf.drives.values())
    Pool.open(other, open_reservable=shelf.seen_by("B")).close()
    assert shelf.holders == ["B", "B"]


def test_a_service_that_was_killed_has_its_drives_again(path: Path, shelf: Shelf) -> None:
    opened = shelf.seen_by("A")
    for name in ("data", "data.1"):
        DriveOwners(service_id(PoolLayout(path)), opened, may_take_over=False).take(0, path / name)
    with Pool.open(path, open_reservable=opened):
        assert shelf.holders == ["A", "A"]
        assert [drive.record and drive.record.epoch for drive in shelf.drives.values()] == [2, 2]


def test_an_index_that_another_owner_has_overtaken_is_refused(path: Path, other: Path, shelf: Shelf) -> None:
    """Taken over or not: who it was taken from has opened segments that this index does not know."""
    for _ in range(2):
        Pool.open(path, open_reservable=shelf.seen_by("A")).close()
    for name in ("data", "data.1"):
        shutil.copy(path / name, other / name)
    with pytest.raises(FormatError, match="old copy"):
        Pool.open(other, open_reservable=shelf.seen_by("B"), may_take_over=True)


def test_a_drive_that_leaves_is_given_back(pool: Pool, shelf: Shelf) -> None:
    pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=5)
    assert shelf.holders == ["A", None]


class Refusing(ClosableHost):
    error: Exception = MediaError("no answer", next_step="none")

    def register(self, key: int) -> None:
        raise self.error


def refusing(error: Exception) -> OpenReservable:
    def opened(path: Path) -> Reservable:
        host = Refusing(SharedDrive(), "A")
        host.error = error
        return Reservable(host, host)

    return opened


def test_who_may_not_reserve_is_told_and_has_the_lock_of_its_machine(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forbidden = MediaError("not permitted", next_step="none")
    forbidden.__cause__ = PermissionError(1, "Operation not permitted")
    with Pool.open(path, open_reservable=refusing(forbidden)) as pool, Holder(pool) as holder:
        assert holder.put(0)
    assert "is not reserved" in caplog.text
    with Pool.open(path, open_reservable=refusing(UnsupportedError("no such call", next_step="none"))):
        pass


def test_a_drive_that_cannot_be_asked_is_not_written(path: Path) -> None:
    with Pool.open(path, open_reservable=refusing(MediaError("EIO", next_step="none"))) as pool, Holder(pool) as holder:
        assert holder.reserve(0).outcome is ReserveOutcome.NO_SPACE


def test_files_have_no_reservations(path: Path) -> None:
    assert open_block_reservable(path / "data") is None


def test_the_service_of_a_directory_is_the_same_over_its_lives(path: Path) -> None:
    assert service_id(PoolLayout(path)) == service_id(PoolLayout(path))
    (path / "service.id").write_text("damaged")
    assert service_id(PoolLayout(path)) == service_id(PoolLayout(path))
