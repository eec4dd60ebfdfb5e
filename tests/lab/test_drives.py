"""Drives of the emulated machine, found and read through Linux' driver; and one owner for a disk that two machines
reach."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest
from meshfusion.tools.lab.qemu import EmulatedDrive
from tests.lab.conftest import machine_or_skip

DRIVES = (EmulatedDrive(128), EmulatedDrive(256, zone_mib=16))


@pytest.fixture
def emulated(tmp_path: Path) -> Any:
    def run(case: str) -> dict[str, Any]:
        tail = OutputTail(1 << 20)
        command = (sys.executable, str(Path(__file__).parent / "guest_drives.py"), case)
        result = run_guest(
            GuestRun(command, kind="tcg", output_directory=tmp_path), machine=machine_or_skip("tcg", DRIVES), sink=tail
        )
        assert result.exit_code == 0, f"{tail.stdout}{tail.stderr}\n{(tmp_path / CONSOLE_LOG).read_text()}"
        report: dict[str, Any] = json.loads(tail.stdout.splitlines()[-1])
        return report

    return run


def test_drives_as_nvme_cli_sees_them(emulated: Any) -> None:
    report = emulated("drives")
    assert report["passed"] == []
    assert [drive["where"] for drive in report["drives"]] == ["/dev/nvme0n1", "/dev/nvme1n1"]
    for drive, size_mib in zip(report["drives"], (128, 256), strict=True):
        said = report["nvme_cli"][drive["where"]]
        controller, namespace, health = said["controller"], said["namespace"], said["health"]
        assert drive["key"] == f"{controller['sn'].strip()}/nsid.1"
        assert drive["model"] == controller["mn"].strip()
        assert drive["capacity_bytes"] == namespace["nsze"] * 4096 == size_mib << 20
        assert drive["lba_bytes"] == 1 << namespace["lbafs"][namespace["flbas"] & 0xF]["ds"]
        assert drive["npwg"] == namespace["npwg"] + 1
        assert drive["deallocates"] == bool(controller["oncs"] & 4)
        assert drive["reads_deallocated_as"] == {0: "UNKNOWN", 1: "ZEROS", 2: "ONES"}[namespace["dlfeat"] & 7]
        assert drive["has_reservations"] == bool(controller["oncs"] & 0x20 and namespace["rescap"])
        assert drive["temperature_c"] == health["temperature"] - 273
        assert drive["percentage_used"] == health["percent_used"]
        assert drive["transport"] == "pcie"
    assert report["drives"][0]["zone_lbas"] is None
    assert report["drives"][1]["zone_lbas"] == (16 << 20) // 4096
    assert "zoned" in report["drives"][1]["problem"]
    assert report["registering"] == (
        "UnsupportedError: /dev/nvme0n1 has no reservations: the drive does not know the command"
    )


def test_one_owner_of_a_disk_with_two_ports(emulated: Any) -> None:
    report = emulated("owners")
    assert report["same_medium"] == ["done", 1]
    assert report["refused"].startswith("DriveOwnedError: the drive is owned by another service")
    assert report["beside_owner"] == ["EBADE", 1]  # who is no owner may read, and not write
    assert report["by_owner"] == ["done", 3]
    assert report["taken_over"] == [True, True]
    assert report["loser"] == ["EBADE", 3]
    assert report["loser_record"].startswith("ReservationConflictError")
    assert report["winner"] == ["done", 5]
    assert report["stale"] == ["EBADE", 5]  # also when the winner has ended
    # Each life of a service has an epoch of its own; only who follows an orderly end need not rebuild.
    assert report["epochs"] == [1, 2, 3, 4]
    assert report["rebuilds"] == [False, True, False, True]
