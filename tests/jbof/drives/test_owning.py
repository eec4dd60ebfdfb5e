from __future__ import annotations

import contextlib
import dataclasses
import uuid
from pathlib import Path

import pytest

from meshfusion.jbof.drives.capabilities import ReservationCapability
from meshfusion.jbof.drives.drive import Drive, DriveKind
from meshfusion.jbof.drives.ownership import DriveOwnedError, Ownership, carry_out, take
from meshfusion.jbof.drives.system.file_lock import FileReservations
from meshfusion.jbof.drives.system.files import FileDrives
from meshfusion.jbof.drives.system.owning import LockedReservations, open_reservations
from meshfusion.jbof.errors import MediaError, UnsupportedError
from tests.jbof.drives.shared_drive import DriveAsHost, SharedDrive

OWNER = uuid.UUID(int=0xA)


@dataclasses.dataclass
class ClosableHost(DriveAsHost):
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "node"
    path.write_bytes(bytes(2 << 20))
    return path


def found(node: Path) -> Drive:
    (drive,) = FileDrives([node]).discover().drives
    return drive


def process(node: Path, drive: SharedDrive) -> tuple[LockedReservations, ClosableHost]:
    """Of one machine, whose processes are one host to the drive."""
    host = ClosableHost(drive, "machine")
    return LockedReservations(FileReservations(node), host), host


def owned(reservations: LockedReservations, host: ClosableHost, key: int) -> Ownership:
    ownership = carry_out(take(OWNER, key, may_take_over=True), reservations, host)
    assert isinstance(ownership, Ownership)
    return ownership


def test_a_second_process_does_not_replace_the_owners_key(node: Path) -> None:
    drive = SharedDrive()
    first, first_host = process(node, drive)
    second, second_host = process(node, drive)
    owned(first, first_host, 11)
    with pytest.raises(DriveOwnedError, match="in use by another process"):
        owned(second, second_host, 22)
    assert drive.keys == {"machine": 11}
    first.close()  # its process ends
    assert first_host.is_closed
    assert owned(second, second_host, 22).record.epoch == 2
    assert drive.keys == {"machine": 22}
    second.close()


def test_a_file_is_locked(node: Path) -> None:
    reservations = open_reservations(found(node))
    with contextlib.closing(reservations):
        assert isinstance(reservations, FileReservations)


def test_a_drive_with_reservations_is_reserved_too(node: Path) -> None:
    drive = found(node)
    able = dataclasses.replace(drive.capabilities, reservations=ReservationCapability.WRITE_EXCLUSIVE)
    reservations = open_reservations(dataclasses.replace(drive, kind=DriveKind.NVME, capabilities=able))
    with contextlib.closing(reservations):
        assert isinstance(reservations, LockedReservations)
        with pytest.raises(UnsupportedError, match="has no reservations"):
            reservations.register(1)  # it is a file after all
    unable = open_reservations(dataclasses.replace(drive, kind=DriveKind.NVME))
    with contextlib.closing(unable):
        assert isinstance(unable, FileReservations)


def test_what_cannot_be_owned_here(node: Path) -> None:
    drive = found(node)
    with pytest.raises(UnsupportedError, match="belongs to SPDK's driver"):
        open_reservations(dataclasses.replace(drive, kind=DriveKind.SPDK))
    node.unlink()
    with pytest.raises(MediaError, match="cannot be locked"):
        open_reservations(drive)
