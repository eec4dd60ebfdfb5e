"""Runs in the emulated machine, as ``python guest_drives.py CASE``: drives, and who owns them.

Prints what it saw as one JSON object. QEMU's drives have no reservations, and Linux 6.1's target has none either, so
owners contend for a SCSI disk: Linux' own target (LIO) on a ramdisk, reached over two loopback ports, each with an
initiator of its own. To the kernel's calls (linux/pr.h) both kinds of drive are alike.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from meshfusion.jbof.drives.drive import Drive
from meshfusion.jbof.drives.ownership import Ownership, carry_out, close, take
from meshfusion.jbof.drives.system import block_reservations
from meshfusion.jbof.drives.system.block_reservations import BlockReservations
from meshfusion.jbof.drives.system.ioctls import PR_PREEMPT
from meshfusion.jbof.drives.system.medium_records import MediumRecords
from meshfusion.jbof.drives.system.server import ServerDrives
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.lab.guest_setup.steps import Link, MakeDirectory, Write, load_modules, output_of
from meshfusion.tools.lab.guest_setup.steps import carry_out as set_up

CONFIGFS = Path("/sys/kernel/config/target")
RAMDISK_PAGES = 4096  # of 4 KiB
BLOCK_BYTES = 4096
PORTS = ("naa.6001405000000001", "naa.6001405000000002")
NEXUSES = ("naa.60014050000000a1", "naa.60014050000000a2")
RECORD_AT_BYTES = 1 << 20


def drives() -> dict[str, object]:
    """What is found, and what nvme-cli says of the same drives."""
    found = ServerDrives(node="guest").discover()
    return {
        "registering": outcome(lambda: BlockReservations.open(Path("/dev/nvme0n1")).register(7)),
        "drives": [told(drive) for drive in found.drives],
        "passed": [passed.reason for passed in found.passed],
        "nvme_cli": {drive.where: by_nvme_cli(drive.where) for drive in found.drives},
        "left": [],
    }


def told(drive: Drive) -> dict[str, object]:
    capabilities, health = drive.capabilities, drive.health
    assert health is not None
    return {
        "where": drive.where,
        "key": drive.identity.key,
        "model": drive.identity.model,
        "capacity_bytes": capabilities.capacity_bytes,
        "lba_bytes": capabilities.lba_bytes,
        "npwg": capabilities.hints and capabilities.hints.npwg,
        "deallocates": capabilities.can_deallocate,
        "reads_deallocated_as": capabilities.deallocated_read.name,
        "has_reservations": capabilities.reservations is not None,
        "zone_lbas": capabilities.zones and capabilities.zones.zone_lbas,
        "problem": capabilities.problem,
        "temperature_c": health.temperature_c,
        "percentage_used": health.percentage_used,
        "address": drive.location.address,
        "transport": drive.location.transport,
    }


def by_nvme_cli(device: str) -> dict[str, object]:
    pages = {"controller": "id-ctrl", "namespace": "id-ns", "health": "smart-log"}
    return {name: json.loads(output_of("nvme", command, device, "-o", "json")) for name, command in pages.items()}


def two_ports() -> list[Path]:
    """One disk, seen over two ports: the device of each."""
    load_modules("target_core_mod", "tcm_loop", "sd_mod")
    Path("/var/target/pr").mkdir(parents=True, exist_ok=True)  # where LIO keeps what outlives a loss of power
    before = set(scsi_disks())
    disk = CONFIGFS / "core/rd_mcp_0/shared"
    set_up(
        [
            MakeDirectory(disk.parent),
            MakeDirectory(disk),
            Write(disk / "control", f"rd_pages={RAMDISK_PAGES}"),
            Write(disk / "enable", "1"),
            MakeDirectory(CONFIGFS / "loopback"),
        ]
    )
    devices: list[Path] = []
    for port, nexus in zip(PORTS, NEXUSES, strict=True):
        group = CONFIGFS / "loopback" / port / "tpgt_1"
        set_up(
            [
                MakeDirectory(group.parent),
                MakeDirectory(group),
                Write(group / "nexus", nexus),
                MakeDirectory(group / "lun/lun_0"),
                Link(group / "lun/lun_0/disk", disk),
            ]
        )
        until(lambda: len(scsi_disks()) > len(before) + len(devices))  # noqa: B023
        new = [Path("/dev") / name for name in scsi_disks() if name not in before]
        devices += [device for device in new if device not in devices]
    until(lambda: all(device.exists() for device in devices))
    return devices


def scsi_disks() -> list[str]:
    return sorted(entry.name for entry in Path("/sys/block").glob("sd*"))


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.02)


class Host:
    """One of two machines at a dual-port drive."""

    def __init__(self, device: Path) -> None:
        self.device = device
        self.name = uuid.uuid4()
        self.reservations = BlockReservations.open(device)
        self.records = MediumRecords(device, RECORD_AT_BYTES)

    def take(self, *, may_take_over: bool = False) -> Ownership:
        key = int.from_bytes(os.urandom(8), "little") | 1
        ownership = carry_out(take(self.name, key, may_take_over=may_take_over), self.reservations, self.records)
        assert isinstance(ownership, Ownership)
        return ownership

    def close(self, ownership: Ownership) -> None:
        carry_out(close(ownership), self.reservations, self.records)

    def write(self, value: int) -> str:
        """One block; "done" or the error's name."""
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        buffer[:] = bytes([value]) * BLOCK_BYTES
        fd = os.open(self.device, os.O_WRONLY | os.O_DIRECT)
        try:
            os.pwritev(fd, [buffer], 0)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        finally:
            os.close(fd)
        return "done"

    def read(self) -> int:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        fd = os.open(self.device, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [buffer], 0)
        finally:
            os.close(fd)
        return buffer[0]


def owners() -> dict[str, object]:
    """The second machine is refused, takes over, and the first one's write fails; then it gives up.

    LIO of Linux 6.1 hangs in Preempt and Abort over loopback ports (core_tmr_lun_reset waits for ever), so here it is
    Preempt: nothing is under way that would have to be aborted.
    """
    block_reservations.PR_PREEMPT_ABORT = PR_PREEMPT  # type: ignore[attr-defined]
    first, second = map(Host, two_ports())
    same_medium = first.write(1), second.read()
    one = first.take()
    refused = outcome(second.take)
    beside_owner = second.write(2), second.read()
    by_owner = first.write(3), second.read()
    other = second.take(may_take_over=True)
    loser = first.write(4), second.read()
    loser_record = outcome(lambda: first.close(one))
    winner = second.write(5), first.read()
    second.close(other)
    stale = first.write(6), second.read()
    third = first.take()
    again = first.take()  # the same machine, after a crash of its service
    return {
        "same_medium": same_medium,
        "refused": refused,
        "beside_owner": beside_owner,
        "by_owner": by_owner,
        "taken_over": [other.was_taken_over, other.needs_rebuild],
        "loser": loser,
        "loser_record": loser_record,
        "winner": winner,
        "stale": stale,
        "epochs": [o.record.epoch for o in (one, other, third, again)],
        "rebuilds": [o.needs_rebuild for o in (one, other, third, again)],
        "left": [],
    }


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except MeshFusionError as error:
        return f"{type(error).__name__}: {error.message}"
    return "done"


CASES = (drives, owners)

if __name__ == "__main__":
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
