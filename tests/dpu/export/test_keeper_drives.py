"""Every drive of a pool is a namespace of each host: what they are told, and when all of them are cut off."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool_create import add_drive, create_pool_of_drives
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.export.fake_nvmet import FakeKernel
from tests.dpu.export.keeper_cases import SILENCE_S, Rig, until
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES


class DrivesRig(Rig):
    """A pool of three drives."""

    def __init__(self, folder: Path) -> None:
        self.key_lifetime_s = math.inf
        self.path = folder / "pool"
        create_pool_of_drives(self.path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None] * 3)
        self.devices = {nsid: str((self.path / name).resolve()) for nsid, name in enumerate(DRIVE_FILES, start=1)}
        self.kernel = FakeKernel(set(self.devices.values()))
        self.now_s = 0.0
        self.prefix = None
        self.pool = self.open()

    def exported(self, attachment: api.Attachment) -> dict[int, str]:
        """The devices behind the namespaces of its subsystem."""
        assert attachment.export is not None
        folder = f"subsystems/{attachment.export.subsystem_nqn}/namespaces"
        return {int(nsid): self.kernel.read(f"{folder}/{nsid}/device_path") for nsid in self.kernel.entries(folder)}


DRIVE_FILES = ("data", "data.1", "data.2")


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[DrivesRig]:
    rig = DrivesRig(tmp_path)
    yield rig
    rig.pool.close()


def test_every_drive_is_a_namespace_of_each_host(drives: DrivesRig) -> None:
    one, two = drives.attach("one"), drives.attach("two")
    for attachment in (one, two):
        assert [namespace.nsid for namespace in attachment.namespaces] == [1, 2, 3]
        assert drives.exported(attachment) == drives.devices
        drives.connect(attachment)
    assert {device for _, device in drives.kernel.reachable()} == set(drives.devices.values())
    assert one.export is not None
    folder = f"subsystems/{one.export.subsystem_nqn}/namespaces"
    identities = [drives.kernel.read(f"{folder}/{nsid}/device_uuid") for nsid in (1, 2, 3)]
    assert identities[0] == one.pool_uuid, "as a pool of one drive shows itself"
    assert len(set(identities)) == 3


def test_extents_name_the_namespaces(drives: DrivesRig) -> None:
    attachment = drives.attach("one")
    extents = [extent for chunk in range(12) for extent in drives.reserve(attachment, chunk).extents]
    assert len({extent.namespace for extent in extents}) >= 2
    assert all(extent.namespace == drive_of_segment(extent.segment) + 1 for extent in extents)


def test_a_host_that_goes_loses_every_drive_and_waits_for_each(drives: DrivesRig) -> None:
    attachment = drives.attach("one")
    drives.connect(attachment)
    assert drives.reserve(attachment).outcome is api.ReserveOutcome.GRANTED
    assert attachment.export is not None
    writing = drives.kernel.hold[attachment.export.subsystem_nqn, "3"] = threading.Event()
    drives.now_s += SILENCE_S
    until(lambda: drives.states() == {"one": "condemned"})
    time.sleep(0.3)
    assert drives.status().grant_count == 1, "its write to the last drive may still land"
    writing.set()
    until(lambda: drives.states() == {})
    assert drives.status().grant_count == 0
    assert drives.kernel.reachable() == set()


def test_a_drive_that_is_away_is_not_exported_and_is_again_when_it_is_back(drives: DrivesRig) -> None:
    first = drives.attach("one")
    drives.pool.close()
    away = drives.path / "data.1"
    away.rename(drives.path / "elsewhere")
    drives.open()
    assert first.export is not None
    attachment = drives.attach("two")
    assert [namespace.nsid for namespace in attachment.namespaces] == [1, 3]
    assert drives.exported(attachment).keys() == {1, 3}
    until(lambda: drives.exported(first).keys() == {1, 3})
    drives.pool.close()
    (drives.path / "elsewhere").rename(away)
    drives.open()
    attachment = drives.attach("three")
    assert drives.exported(attachment) == drives.devices


def test_a_pool_that_was_exported_gets_another_drive(drives: DrivesRig) -> None:
    drives.attach("one")
    drives.pool.close()
    add_drive(drives.path, size_bytes=SIZE_BYTES)
    device = str((drives.path / "data.3").resolve())
    drives.kernel.devices.add(device)
    drives.open()
    assert drives.exported(drives.attach("two")) == {**drives.devices, 4: device}
