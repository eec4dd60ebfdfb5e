"""Slices of one drive: what a device lies on, and one reservation for all pools of a service."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfusion.dpu import slices
from meshfusion.dpu.api.drive_types import RemoveDriveRequest
from meshfusion.dpu.drive_keys import DriveKeys
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.drive_owners import OpenReservable, Reservable
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.slices import block_devices_under, physical_device
from meshfusion.jbof.drives.ownership import DriveOwnedError, OwnerRecord
from meshfusion.jbof.errors import MediaError, MeshFusionError
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES, Holder
from tests.dpu.test_drive_owners import ClosableHost
from tests.host.support.waiting import until
from tests.jbof.drives.shared_drive import SharedDrive

FAST = DriveOptions(check_interval_s=0.02, probation_s=0.1, health_interval_s=0.05)


class Slice:
    """Its own medium, and so its own record; a drive that it shares."""

    def __init__(self) -> None:
        self.record: OwnerRecord | None = None

    def seen_by(self, host: ClosableHost) -> SliceAsHost:
        return SliceAsHost(self, host)


class SliceAsHost:
    def __init__(self, one: Slice, host: ClosableHost) -> None:
        self._slice, self._host = one, host

    def read(self) -> OwnerRecord | None:
        return self._slice.record

    def write(self, record: OwnerRecord) -> None:
        if not self._host.drive.may_write(self._host.name):
            raise MediaError("reservation conflict", next_step="none")
        self._slice.record = record


class Shelf:
    """A drive with a slice for each pool, that several machines reach."""

    def __init__(self) -> None:
        self.drive = SharedDrive()
        self.slices: dict[Path, Slice] = {}
        self.fail: Callable[[str, Path], None] = lambda _what, _path: None

    def seen_by(self, machine: str) -> OpenReservable:
        def opened(path: Path) -> Reservable:
            host = ClosableHost(self.drive, machine)
            one = self.slices.setdefault(path, Slice())
            real_report = host.report
            host.report = lambda: (self.fail("report", path), real_report())[1]  # type: ignore[method-assign]
            return Reservable(host, one.seen_by(host), "259:0")

        return opened


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "red", tmp_path / "blue"]
    for path in paths:
        create_pool_of_drives(path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None])
    return paths


def opened(
    path: Path, shelf: Shelf, keys: DriveKeys | None = None, machine: str = "A", *, takeover: bool = False
) -> Pool:
    return Pool.open(
        path,
        drive_options=FAST,
        open_reservable=shelf.seen_by(machine),
        drive_keys=keys,
        may_take_over=takeover,
    )


def states(pool: Pool) -> list[str]:
    return [drive.state for drive in pool.drive_admin.drives(deadline_s=1)]


def test_pools_of_one_service_hold_a_drive_together(paths: list[Path], shelf: Shelf) -> None:
    keys = DriveKeys()
    with opened(paths[0], shelf, keys) as red, opened(paths[1], shelf, keys) as blue:
        (key,) = shelf.drive.keys.values()
        assert {one.record and one.record.key for one in shelf.slices.values()} == {key}
        for pool in (red, blue):
            with Holder(pool) as holder:
                assert holder.put(0)
        for _ in range(3):  # they are looked at again and again, and neither finds its drive lost
            until(lambda: states(red) == states(blue) == ["online"])
    assert shelf.drive.holder == "A"
    assert all(one.record and one.record.is_clean for one in shelf.slices.values())


def test_with_a_key_each_they_would_take_it_from_each_other(paths: list[Path], shelf: Shelf) -> None:
    """What the shared key is for; and what two services on one drive meet."""
    with opened(paths[0], shelf) as red, opened(paths[1], shelf):
        until(lambda: states(red) == ["gone"])


def test_the_end_of_one_pool_leaves_the_drive_to_the_other(paths: list[Path], shelf: Shelf) -> None:
    keys = DriveKeys()
    with opened(paths[1], shelf, keys) as blue:
        opened(paths[0], shelf, keys).close()
        assert shelf.drive.holder == "A"
        with opened(paths[0], shelf, keys), Holder(blue) as holder:
            assert holder.put(0)
        assert len(shelf.drive.keys) == 1


def test_a_pool_that_cannot_be_opened_leaves_the_drive_to_the_other(paths: list[Path], shelf: Shelf) -> None:
    keys = DriveKeys()

    def fail(what: str, path: Path) -> None:
        if path.parent == paths[0]:
            raise MediaError(f"no {what}", next_step="none")

    with opened(paths[1], shelf, keys) as blue:
        shelf.fail = fail
        with pytest.raises(MeshFusionError):
            opened(paths[0], shelf, keys)
        assert shelf.drive.holder == "A"
        with Holder(blue) as holder:
            assert holder.put(0)
        shelf.fail = lambda _what, _path: None
        with opened(paths[0], shelf, keys) as red:
            until(lambda: states(red) == states(blue) == ["online"])


def test_a_slice_that_leaves_its_pool_leaves_the_drive_to_the_others(tmp_path: Path, shelf: Shelf) -> None:
    keys = DriveKeys()
    path = tmp_path / "pool"
    create_pool_of_drives(path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None, None])
    with opened(path, shelf, keys) as pool:
        pool.drive_admin.remove_drive(RemoveDriveRequest(1), deadline_s=5)
        assert shelf.drive.holder == "A"
        with Holder(pool) as holder:
            assert holder.put(0)


def test_a_service_that_was_killed_has_all_its_slices_again(paths: list[Path], shelf: Shelf) -> None:
    """In another order, and as another host, as which a user-space driver may come back."""
    keys = DriveKeys()
    killed = [opened(path, shelf, keys) for path in paths]
    for pool in killed:
        pool._parts.taken.owners.abandon()
        pool.close()
    assert not any(one.record and one.record.is_clean for one in shelf.slices.values())
    keys = DriveKeys()
    with opened(paths[1], shelf, keys, "A2") as blue, opened(paths[0], shelf, keys, "A2") as red:
        assert shelf.drive.holder == "A2"
        until(lambda: states(red) == states(blue) == ["online"])


def test_a_takeover_takes_all_slices_of_the_drive(paths: list[Path], shelf: Shelf) -> None:
    keys = DriveKeys()
    red, blue = (opened(path, shelf, keys) for path in paths)
    for pool in (red, blue):
        pool._parts.taken.owners.abandon()
        pool.close()
    # Another service: its directories have other ids.
    for path in paths:
        (path / "service.id").unlink()
    other = DriveKeys()
    with pytest.raises(DriveOwnedError):
        opened(paths[0], shelf, other, "B")
    assert list(shelf.drive.keys) == ["A"], "nothing is left of it"
    with (
        opened(paths[0], shelf, other, "B", takeover=True) as red,
        opened(paths[1], shelf, other, "B", takeover=True) as blue,
    ):
        assert (shelf.drive.holder, shelf.drive.preempted) == ("B", ["A"])
        until(lambda: states(red) == states(blue) == ["online"])


# ---- what a device lies on -------------------------------------------------------------------------------------------


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """nvme0n1 with two partitions; a volume on the second, one on both a partition and another drive."""
    root = tmp_path / "sys"
    block = root / "devices"

    def made(folder: Path, number: str, *slaves: str, partition: bool = False) -> None:
        folder.mkdir(parents=True)
        (folder / "dev").write_text(f"{number}\n")
        if partition:
            (folder / "partition").write_text("1\n")
        else:
            (folder / "slaves").mkdir()
        for slave in slaves:
            (folder / "slaves" / slave).symlink_to(next(block.rglob(slave)))
        (root / "dev" / "block").mkdir(parents=True, exist_ok=True)
        (root / "dev" / "block" / number).symlink_to(folder)

    made(block / "nvme0n1", "259:0")
    made(block / "nvme0n1" / "nvme0n1p1", "259:1", partition=True)
    made(block / "nvme0n1" / "nvme0n1p2", "259:2", partition=True)
    made(block / "nvme1n1", "259:3")
    made(block / "dm-0", "253:0", "nvme0n1p2")
    made(block / "dm-1", "253:1", "dm-0")
    made(block / "dm-2", "253:2", "nvme0n1p1", "nvme1n1")
    monkeypatch.setattr(slices, "device_number", lambda path: path.name if ":" in path.name else "")
    return root


@pytest.mark.parametrize(
    ("device", "under", "drive"),
    [
        ("259:0", set(), "259:0"),
        ("259:1", {"259:0"}, "259:0"),
        ("253:0", {"259:2", "259:0"}, "259:0"),
        ("253:1", {"253:0", "259:2", "259:0"}, "259:0"),
        ("253:2", {"259:1", "259:0", "259:3"}, ""),
        ("9:9", set(), "9:9"),
        ("a file", set(), ""),
    ],
)
def test_what_a_device_lies_on(sysfs: Path, device: str, under: set[str], drive: str) -> None:
    assert block_devices_under(Path("/dev") / device, sysfs) == under
    assert physical_device(Path("/dev") / device, sysfs) == drive


def test_this_machines_own_devices_are_understood() -> None:
    found = [path for path in Path("/dev").iterdir() if path.is_block_device() and os.access(path, os.R_OK)]
    for path in found:
        assert slices.device_number(path)
        assert slices.device_number(path) not in block_devices_under(path)
