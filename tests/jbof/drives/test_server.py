"""Discovery on a server: a tree like sysfs, and drives made of pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Location
from meshfusion.jbof.drives.drive import DriveKind, Found
from meshfusion.jbof.drives.pages import PageReader
from meshfusion.jbof.drives.system.enclosure import blink, slot_of
from meshfusion.jbof.drives.system.server import ServerDrives
from meshfusion.jbof.errors import MediaError, UnsupportedError
from tests.jbof.drives.fake_pages import FakePages, drive_pages
from tests.jbof.drives.sysfs_tree import add_drive, add_ses_slot, link, write


class Rig:
    """``pages``: of each controller, by its number."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "sys"
        (self.root / "block").mkdir(parents=True)
        self.pages: dict[int, FakePages] = {}

    def add(self, number: int, serial: str, pci: str, **more: object) -> Path:
        self.pages[number] = drive_pages(serial)
        return add_drive(self.root, number, pci, **more)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def open(self, device: Path) -> Iterator[PageReader]:
        number = int(device.name.removeprefix("nvme"))
        if number not in self.pages:
            raise MediaError(f"{device} cannot be opened", next_step="none")
        yield self.pages[number]

    def discover(self, domains: DomainMap | None = None) -> Found:
        source = ServerDrives(domains, root=self.root, devices=Path("/dev"), open_controller=self.open, node="node-a")
        return source.discover()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.mark.parametrize("multipath", [True, False])
def test_drives_on_the_bus(rig: Rig, multipath: bool) -> None:
    rig.add(0, "S2", "0000:00:03.0/0000:04:00.0", multipath=multipath)
    rig.add(1, "S1", "0000:00:04.0/0000:05:00.0", multipath=multipath)
    found = rig.discover()
    assert found.passed == ()
    # By identity, whatever number the kernel gave them.
    assert [(drive.identity.serial, drive.where) for drive in found.drives] == [
        ("S1", "/dev/nvme1n1"),
        ("S2", "/dev/nvme0n1"),
    ]
    drive = found.drives[0]
    assert drive.kind is DriveKind.NVME
    assert drive.location == Location("", "0000:05:00.0", "pcie")
    assert drive.domain == FailureDomain("S1", "0000:00:04.0", "node-a", "node-a")
    assert drive.capabilities.capacity_bytes == 128 << 20
    assert drive.health is not None


def test_an_identity_does_not_follow_the_path(rig: Rig, tmp_path: Path) -> None:
    rig.add(0, "S1", "0000:00:03.0/0000:04:00.0")
    before = rig.discover().drives[0]
    again = Rig(tmp_path / "again")
    again.add(7, "S1", "0000:00:09.0/0000:0c:00.0")
    after = again.discover().drives[0]
    assert before.where != after.where
    assert before.identity == after.identity


def test_slot_and_enclosure_by_ses_and_names_by_the_configuration(rig: Rig) -> None:
    add_ses_slot(rig.root, rig.add(0, "S1", "0000:00:03.0/0000:04:00.0"), "7:0:0:0", "12")
    names = DomainMap(for_all={"rack": "r4"}, by_slot={"12": {"dpu": "dpu-1"}})
    (drive,) = rig.discover(names).drives
    assert drive.location.slot == "12"
    assert drive.domain == FailureDomain("S1", "0000:00:03.0", "dpu-1", "7:0:0:0", "r4")


def test_what_is_passed_over_is_named(rig: Rig) -> None:
    rig.add(0, "S0", "0000:00:03.0/0000:04:00.0", state="dead")
    rig.add(1, "S1", "0000:00:04.0/0000:05:00.0", transport="rdma")
    rig.add(2, "S2", "0000:00:05.0/0000:06:00.0")
    del rig.pages[2]
    rig.add(3, "S3", "0000:00:06.0/0000:07:00.0")
    found = rig.discover()
    assert [drive.identity.serial for drive in found.drives] == ["S3"]
    assert {passed.where: passed.reason for passed in found.passed} == {
        "/dev/nvme0n1": "no controller of it is live",
        "/dev/nvme1n1": "it is attached over rdma, not on this machine's bus",
        "/dev/nvme2n1": "/dev/nvme2 cannot be opened",
    }


def test_twins_are_offered_not_at_all(rig: Rig) -> None:
    rig.add(0, "S1", "0000:00:03.0/0000:04:00.0", multipath=False)
    rig.add(1, "S1", "0000:00:04.0/0000:05:00.0", multipath=False)
    found = rig.discover()
    assert found.drives == ()
    (passed,) = found.passed
    assert passed.where == "/dev/nvme0n1, /dev/nvme1n1"
    assert "same identity S1/nsid.1" in passed.reason


def test_partitions_and_what_is_stacked_on_it(rig: Rig) -> None:
    rig.add(0, "S1", "0000:00:03.0/0000:04:00.0")
    block = rig.root / "devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1"
    write(block / "nvme0n1p1/partition", "1\n")
    write(block / "holders/dm-3", "")
    assert rig.discover().drives[0].users == ("dm-3", "nvme0n1p1")


def test_a_machine_without_drives(tmp_path: Path) -> None:
    assert ServerDrives(root=tmp_path, node="a").discover() == Found(())


def test_the_light_of_an_ses_slot(rig: Rig) -> None:
    locate = add_ses_slot(rig.root, rig.add(0, "S1", "0000:00:03.0/0000:04:00.0"))
    other = add_ses_slot(rig.root, rig.add(1, "S2", "0000:00:03.0/0000:05:00.0"), slot="13")
    slot = slot_of(rig.root, "0000:04:00.0")
    blink(slot, "S1", on=True)
    assert (locate.read_text(), other.read_text()) == ("1", "0\n")
    blink(slot, "S1", on=False)
    assert locate.read_text() == "0"


def test_the_light_by_pcie(rig: Rig) -> None:
    rig.add(0, "S1", "0000:00:03.0/0000:04:00.0")
    light = rig.root / "class/leds/0000:04:00.0:enclosure:locate/brightness"
    write(light, "0\n")
    write(rig.root / "bus/pci/slots/5-1/address", "0000:04:00\n")
    slot = slot_of(rig.root, "0000:04:00.0")
    assert slot.name == "5-1"
    blink(slot, "S1", on=True)
    assert light.read_text() == "1"


def test_no_light_is_said_plainly(rig: Rig) -> None:
    rig.add(0, "S1", "0000:00:03.0/0000:04:00.0")
    write(rig.root / "bus/pci/slots/5-1/address", "0000:04:00\n")
    write(rig.root / "bus/pci/slots/6/address", "0000:05:00\n")
    with pytest.raises(UnsupportedError) as caught:
        blink(slot_of(rig.root, "0000:04:00.0"), "S1", on=True)
    assert "light of drive S1 cannot be switched" in caught.value.message
    assert "its slot is 5-1" in caught.value.next_step


def test_a_light_that_refuses(rig: Rig) -> None:
    device = rig.add(0, "S1", "0000:00:03.0/0000:04:00.0")
    locate = add_ses_slot(rig.root, device)
    locate.unlink()
    link(locate, rig.root / "nowhere/at/all")
    slot = slot_of(rig.root, "0000:04:00.0")
    assert slot.light is None  # a dangling file is none
    locate.unlink()
    locate.mkdir()
    with pytest.raises(MediaError, match="cannot be switched"):
        blink(slot_of(rig.root, "0000:04:00.0"), "S1", on=True)
