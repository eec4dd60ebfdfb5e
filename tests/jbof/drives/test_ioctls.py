from __future__ import annotations

import errno
import fcntl
import struct
from pathlib import Path
from typing import Any

import pytest

from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.drives.system import ioctls
from meshfusion.jbof.drives.system.block_reservations import BlockReservations
from meshfusion.jbof.drives.system.nvme_pages import IoctlPages, opened_controller
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.reservations import ReservationType
from meshfusion.jbof.nvme.status import NvmeCommandError


def test_numbers_as_the_kernels_headers_give_them() -> None:
    """Printed by a C program that includes linux/pr.h and linux/nvme_ioctl.h."""
    assert [
        ioctls.PR_REGISTER,
        ioctls.PR_RESERVE,
        ioctls.PR_RELEASE,
        ioctls.PR_PREEMPT,
        ioctls.PR_PREEMPT_ABORT,
        ioctls.PR_CLEAR,
        ioctls.NVME_ADMIN,
        ioctls.NVME_IO,
    ] == [0x401870C8, 0x401070C9, 0x401070CA, 0x401870CB, 0x401870CC, 0x401070CD, 0xC0484E41, 0xC0484E43]


class Kernel:
    """``status``: what calls return, or raise. ``calls``: number and argument of each."""

    def __init__(self) -> None:
        self.status: list[int | OSError] = []
        self.result = 0
        self.calls: list[tuple[int, bytes]] = []

    def ioctl(self, fd: int, number: int, argument: Any = 0) -> int:
        if number == 0x4E40:  # NVME_IOCTL_ID
            return 3
        assert isinstance(argument, bytearray), "of bytes, fcntl returns a copy and no status"
        self.calls.append((number, bytes(argument)))
        if len(argument) == 72:
            argument[68:72] = self.result.to_bytes(4, "little")
        status = self.status.pop(0) if self.status else 0
        if isinstance(status, OSError):
            raise status
        return status


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(fcntl, "ioctl", made.ioctl)
    return made


NVME, SCSI = Path("/dev/nvme0n1"), Path("/dev/sda")
WE = ReservationType.WRITE_EXCLUSIVE


def test_admin_commands(kernel: Kernel) -> None:
    """Fields of struct nvme_passthru_cmd at their places in linux/nvme_ioctl.h."""
    kernel.result = 77
    pages = IoctlPages(0, "/dev/nvme0")
    assert len(pages.identify(0x05, nsid=4, csi=2)) == 4096
    assert len(pages.log_page(0x20, 1 << 20, nsid=0, group=9)) == 1 << 20
    assert pages.feature(0x1D, group=9) == 77
    (identify, log, feature) = [argument for number, argument in kernel.calls if number == ioctls.NVME_ADMIN]
    assert (identify[0], struct.unpack_from("<I", identify, 4)) == (0x06, (4,))
    assert struct.unpack_from("<III", identify, 36) == (4096, 0x05, 2 << 24)
    assert (log[0], struct.unpack_from("<III", log, 36)) == (0x02, (1 << 20, 0xFFFF0020, 9 << 16 | 0x3))
    assert (feature[0], struct.unpack_from("<III", feature, 36)) == (0x0A, (0, 0x1D, 9))
    assert struct.unpack_from("<Q", feature, 24) == (0,)


def test_a_refused_page(kernel: Kernel) -> None:
    kernel.status = [0x4002, OSError(errno.EACCES, "no")]
    pages = IoctlPages(0, "/dev/nvme0")
    with pytest.raises(NvmeCommandError, match="Invalid Field in Command") as caught:
        pages.identify(1)
    assert caught.value.status.dnr
    with pytest.raises(MediaError, match="the driver refused IDENTIFY: no"):
        pages.identify(1)


def test_a_controller_that_is_not_there() -> None:
    with pytest.raises(MediaError, match="cannot be opened"), opened_controller(Path("/dev/nvme-that-is-none")):
        pass


def test_what_the_kernel_is_told(kernel: Kernel) -> None:
    """struct pr_registration, pr_reservation, pr_preempt (linux/pr.h); for the order of preemption's keys see there."""
    drive = BlockReservations(0, SCSI)
    drive.register(0x11)
    drive.acquire(0x11, WE)
    drive.preempt_and_abort(0x11, 0x22, WE)
    drive.release(0x11, WE)
    drive.unregister(0x11)
    assert kernel.calls == [
        (ioctls.PR_REGISTER, struct.pack("<QQII", 0, 0x11, 0, 0)),
        (ioctls.PR_RESERVE, struct.pack("<QII", 0x11, 1, 0)),
        (ioctls.PR_PREEMPT_ABORT, struct.pack("<QQII", 0x11, 0x22, 1, 0)),
        (ioctls.PR_RELEASE, struct.pack("<QII", 0x11, 1, 0)),
        (ioctls.PR_REGISTER, struct.pack("<QQII", 0x11, 0, 0, 0)),
    ]


def test_a_registered_host_replaces_its_key(kernel: Kernel) -> None:
    kernel.status = [0x4083]
    BlockReservations(0, NVME).register(0x11)
    assert kernel.calls[1] == (ioctls.PR_REGISTER, struct.pack("<QQII", 1, 0x11, 1, 0))


@pytest.mark.parametrize(
    ("device", "status"),
    [
        (NVME, 0x4083),
        (NVME, 0x83),
        (NVME, 0x18),  # from Linux 6.5 on
        (SCSI, 0x18),
        (SCSI, 0x118),  # as seen with LIO
        (SCSI, OSError(errno.EBADE, "conflict")),
    ],
)
def test_conflicts(kernel: Kernel, device: Path, status: int | OSError) -> None:
    kernel.status = [status]
    with pytest.raises(ReservationConflictError, match="reserve: reservation conflict"):
        BlockReservations(0, device).acquire(1, WE)


@pytest.mark.parametrize(
    ("device", "status"), [(NVME, 0x4001), (SCSI, OSError(errno.EOPNOTSUPP, "no")), (NVME, OSError(errno.ENOTTY, "no"))]
)
def test_drives_without_reservations(kernel: Kernel, device: Path, status: int | OSError) -> None:
    kernel.status = [status]
    with pytest.raises(UnsupportedError, match="has no reservations"):
        BlockReservations(0, device).acquire(1, WE)


@pytest.mark.parametrize(("device", "status"), [(NVME, 0x6), (SCSI, 0x2), (SCSI, OSError(errno.EIO, "input/output"))])
def test_other_failures(kernel: Kernel, device: Path, status: int | OSError) -> None:
    kernel.status = [status]
    with pytest.raises(MediaError, match="reserve failed") as caught:
        BlockReservations(0, device).acquire(1, WE)
    assert not isinstance(caught.value, ReservationConflictError)


def test_the_report_in_both_forms(kernel: Kernel) -> None:
    kernel.status = [0x4018]  # the host identifier has 8 bytes
    report = BlockReservations(0, NVME).report()
    assert report is not None
    assert report.holder is None
    assert [struct.unpack_from("<III", argument, 36) for _, argument in kernel.calls] == [
        (4096, 1023, 1),
        (4096, 1023, 0),
    ]
    assert [argument[4] for _, argument in kernel.calls] == [3, 3]
    kernel.status = [0x4002]
    with pytest.raises(MediaError, match="report failed"):
        BlockReservations(0, NVME).report()
    assert BlockReservations(0, SCSI).report() is None


def test_a_plain_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    reservations = BlockReservations.open(path)
    try:
        with pytest.raises(UnsupportedError):
            reservations.register(1)
    finally:
        reservations.close()
    with pytest.raises(MediaError):
        BlockReservations.open(tmp_path / "nothing")
