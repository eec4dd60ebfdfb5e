"""A pool of three drives, the kernel that shows them to hosts, and what a host says of them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.drive_types import AddDriveRequest, RemoveDriveRequest
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.jbof.pool_addresses import drive_of_segment, namespace_of
from tests.dpu.export.fake_nvmet import FakeKernel
from tests.dpu.export.keeper_cases import DEADLINE_S, Rig, keeper, until
from tests.dpu.pool_cases import SEGMENT_BYTES, SIZE_BYTES, key

DRIVE_FILES = ("data", "data.1", "data.2")
FAST = DriveOptions(check_interval_s=0.02, probation_s=0.0, drain_s=0.0, window_s=0.2, look_deadline_s=5.0)


class DrivesRig(Rig):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "pool"
        create_pool_of_drives(self.path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None] * 3)
        self.devices = {nsid: str((self.path / name).resolve()) for nsid, name in enumerate(DRIVE_FILES, start=1)}
        self.kernel = FakeKernel(set(self.devices.values()))
        self.now_s = 0.0
        self.prefix = None
        self.pool = self.open()

    def open(self) -> Pool:
        self.pool = Pool.open(
            self.path,
            clock=lambda: self.now_s,
            exports=partial(keeper, self.kernel, self.prefix),
            drive_options=FAST,
        )
        return self.pool

    # ---- the target ----------------------------------------------------------------------------------------------

    def exported(self, attachment: api.Attachment) -> dict[int, str]:
        """The devices behind the namespaces of its subsystem."""
        assert attachment.export is not None
        folder = f"subsystems/{attachment.export.subsystem_nqn}/namespaces"
        return {int(nsid): self.kernel.read(f"{folder}/{nsid}/device_path") for nsid in self.kernel.entries(folder)}

    def shows(self, attachment: api.Attachment, *nsids: int) -> None:
        """Comes to."""
        until(lambda: self.exported(attachment).keys() == set(nsids))

    def is_disabled(self, attachment: api.Attachment, nsid: int) -> bool:
        """It may still wait for requests in flight."""
        assert attachment.export is not None
        return self.kernel.subsystems[attachment.export.subsystem_nqn].namespaces[str(nsid)]["enable"] == "0"

    def reached(self) -> set[str]:
        """What connected hosts can read and write."""
        return {device for _, device in self.kernel.reachable()}

    # ---- drives --------------------------------------------------------------------------------------------------

    def add(self, file: Path) -> int:
        """A file of the pool's size."""
        file.touch()
        os.truncate(file, SIZE_BYTES)
        self.kernel.devices.add(str(file.resolve()))
        request = AddDriveRequest(SIZE_BYTES, str(file), "")
        return self.pool.drive_admin.add_drive(request, deadline_s=DEADLINE_S).number

    def remove(self, number: int, *, deadline_s: float = DEADLINE_S) -> int:
        return self.pool.drive_admin.remove_drive(RemoveDriveRequest(number), deadline_s=deadline_s)

    def numbers(self) -> list[int]:
        return [drive.number for drive in self.pool.drive_admin.drives(deadline_s=1.0)]

    # ---- what a host does ----------------------------------------------------------------------------------------

    def heartbeat(self, attachment: api.Attachment, reached: api.Reached | None = None) -> api.HeartbeatReply:
        request = api.HeartbeatRequest(attachment.holder_id, attachment.epoch, (), reached)
        return self.pool.heartbeat(request, deadline_s=DEADLINE_S)

    def says(self, attachment: api.Attachment, *nsids: int) -> None:
        """All its workers have opened and proven these, of those that it was told."""
        self.heartbeat(attachment, api.Reached(attachment.drives_version, nsids))

    def drives_granted(self, attachment: api.Attachment, first: int, count: int = 12) -> set[int]:
        """Where places are got for chunks from ``first`` on; they are given back."""
        results = [self.reserve(attachment, chunk) for chunk in range(first, first + count)]
        granted = tuple(result.grant_id for result in results if result.outcome is api.ReserveOutcome.GRANTED)
        self.pool.abort(api.AbortRequest(attachment.holder_id, attachment.epoch, granted), deadline_s=DEADLINE_S)
        return {drive_of_segment(extent.segment) for result in results for extent in result.extents}

    def store(self, attachment: api.Attachment, chunk: int) -> int:
        """Commits it, whatever lies there; on which drive."""
        result = self.reserve(attachment, chunk)
        assert result.outcome is api.ReserveOutcome.GRANTED
        item = api.CommitItem(result.grant_id, ((b"digest--",) * 3,))
        request = api.CommitRequest(attachment.holder_id, attachment.epoch, (item,))
        assert self.pool.commit(request, deadline_s=DEADLINE_S).committed == (True,)
        return drive_of_segment(result.extents[0].segment)

    def finds(self, attachment: api.Attachment, chunk: int) -> bool:
        # Each chunk for itself: nothing before it is needed.
        keys = (b"",) * chunk + (key(chunk),)
        group = api.GroupKeys(0, keys, (*range(1, chunk + 1), chunk))
        request = api.MatchRequest(attachment.holder_id, "r", 16, (group,))
        reply = self.pool.match(request, deadline_s=DEADLINE_S)
        if reply.lease_id:
            release = api.ReleaseRequest(attachment.holder_id, (reply.lease_id,))
            self.pool.release(release, deadline_s=DEADLINE_S)
        return reply.chunk_count > 0


def nsids(*numbers: int) -> list[int]:
    return list(map(namespace_of, numbers))
