"""Drives by SPDK: the answers of a real nvmf_tgt that had a drive attached over TCP (it is told to have been on the bus
where that matters)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.spdk.drives import SpdkDrives, SpdkPages
from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Location
from meshfusion.jbof.drives.drive import DriveKind
from meshfusion.jbof.drives.pages import read_drive
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.status import NvmeCommandError

RECORDING = Path(__file__).parent / "drive_recordings/spdk-26.09-3230130e6a.json"


class Replay:
    """Answers as recorded, and refuses what was not asked then."""

    def __init__(self, *, on_the_bus: bool) -> None:
        text = RECORDING.read_text()
        if on_the_bus:
            text = text.replace('"trtype": "TCP"', '"trtype": "PCIe"').replace("127.0.0.1", "0000:03:00.0")
        self.answers: list[dict[str, Any]] = json.loads(text)["answers"]

    def connect(self, timeout_s: float, /) -> int:
        return 1

    def call(self, method: str, timeout_s: float, /, **params: object) -> Any:
        assert timeout_s > 0
        for answer in self.answers:
            if (answer["method"], answer["parameters"]) == (method, params):
                if "code" in answer:
                    raise StepRefusedError(f"SPDK refused {method}", code=answer["code"], next_step="none")
                return answer["result"]
        raise AssertionError(f"{method} {params} was not recorded")

    def close(self) -> None: ...

    def change(self, method: str, result: Any) -> None:
        next(answer for answer in self.answers if answer["method"] == method)["result"] = result


def test_a_drive_on_the_bus() -> None:
    found = SpdkDrives(Replay(on_the_bus=True), "dpu-0", DomainMap(for_all={"rack": "r1"})).discover()
    assert found.passed == ()
    (drive,) = found.drives  # the malloc bdev is none
    # As the namespace was made with these; its bdev has 4096 blocks of 4096 bytes.
    assert drive.identity.key == "SPDK0001/nguid.11223344556677889900aabbccddeeff"
    assert (drive.kind, drive.where) == (DriveKind.SPDK, "Nvme0n1")
    assert drive.capabilities.capacity_bytes == 16 << 20
    assert drive.capabilities.can_deallocate
    assert drive.capabilities.reservations is not None
    assert drive.location == Location("", "0000:03:00.0", "pcie")
    assert drive.domain == FailureDomain("SPDK0001", "0000:03:00.0", "dpu-0", "dpu-0", "r1")
    assert drive.health is None  # SPDK's target reports zeros


def test_hints_are_those_that_spdk_itself_reports() -> None:
    rpc = Replay(on_the_bus=True)
    reading = read_drive(SpdkPages(rpc, "Nvme0"), 1)
    (bdev,) = [b for b in rpc.call("bdev_get_bdevs", 1.0) if b["name"] == "Nvme0n1"]
    hints = reading.capabilities.hints
    assert hints is not None
    assert {
        "preferred_write_granularity": hints.npwg,
        "preferred_write_alignment": hints.npwa,
        "preferred_unmap_granularity": hints.npdg,
        "preferred_unmap_alignment": hints.npda,
        "optimal_write_size": hints.nows,
        "block_size": reading.capabilities.lba_bytes,
        "num_blocks": reading.capabilities.lba_count,
    }.items() <= bdev.items()


def test_what_is_attached_over_a_fabric_is_its_targets() -> None:
    found = SpdkDrives(Replay(on_the_bus=False), "dpu-0").discover()
    assert found.drives == ()
    (passed,) = found.passed
    assert passed.where == "Nvme0n1"
    assert "attached over tcp" in passed.reason


def test_a_controller_that_has_gone() -> None:
    rpc = Replay(on_the_bus=True)
    rpc.change("bdev_nvme_get_controllers", [])
    (passed,) = SpdkDrives(rpc, "dpu-0").discover().passed
    assert "lists no controller of Nvme0n1" in passed.reason


def test_features() -> None:
    pages = SpdkPages(Replay(on_the_bus=False), "Nvme0")
    # Number of Queues, 0's based: SPDK's target has 127 I/O queue pairs by default.
    assert pages.feature(0x07) == 126 << 16 | 126
    with pytest.raises(NvmeCommandError, match="Invalid Field in Command"):
        pages.feature(0x1D)


def test_a_controller_that_spdk_does_not_know() -> None:
    with pytest.raises(MediaError, match="SPDK refused bdev_nvme_send_cmd"):
        SpdkPages(Replay(on_the_bus=False), "Nope").feature(0x1D)


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("bdev_get_bdevs", [{"bdev": "x"}]),
        ("bdev_get_bdevs", [{"name": "x", "driver_specific": {"nvme": [{}]}}]),
        ("bdev_nvme_get_controllers", [{"name": "x"}]),
        ("bdev_nvme_send_cmd", {}),
        ("bdev_nvme_send_cmd", {"cpl": "AAAA", "data": ""}),
    ],
)
def test_reports_of_another_form_are_refused(method: str, result: Any) -> None:
    rpc = Replay(on_the_bus=True)
    rpc.change(method, result)
    source = SpdkDrives(rpc, "dpu-0")
    if method == "bdev_nvme_send_cmd":
        assert "form that is not known" in source.discover().passed[0].reason
    else:
        with pytest.raises(UnsupportedError, match="form that is not known"):
            source.discover()
