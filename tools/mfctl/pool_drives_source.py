"""The drives of a pool, for ``mfctl``: through the service that has the pool, or, when nobody has it, by ourselves."""

from __future__ import annotations

import math
import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol

from meshfusion.dpu.api.drive_client import GrpcDriveAdmin
from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest, DriveStatus, RemoveDriveRequest
from meshfusion.dpu.owner_lock import served_as, served_at
from meshfusion.dpu.pool_create import add_drive
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.pool_remove import remove_drive, set_draining
from meshfusion.jbof.drives.life_words import Reason
from meshfusion.tools.mfctl.encrypted_pools import drives_open
from meshfusion.tools.mfctl.exported_pool import exported_pool, target_of
from meshfusion.tools.mfctl.progress import Progress, told_when_interrupted
from meshfusion.tools.mfctl.service_access import access_to

_DEADLINE_S: Final = 60.0


_NOT_ADDED: Final = "the pool is as it was, and of what lay on the --data-path a part may be gone"
_WAIT = "wait: it is used again when it has been checked and has stayed for a while (drives.probation_s)"
_WAITS = {Reason.UNCHECKED.value, Reason.PROBATION.value}


class PoolDrivesSource(Protocol):
    def rows(self) -> list[dict[str, Any]]:
        """One a drive, by number."""
        ...

    def add(self, size_bytes: int, data_path: Path | None, serial: str | None) -> tuple[int, int]:
        """The new drive's number, and of how many segments it is."""
        ...

    def drain(self, number: int, *, is_ended: bool) -> None: ...

    def remove(self, number: int, config_path: Path | None = None) -> int:
        """How many chunks lay on it. ``config_path``: the service's configuration, where its target is to be asked and
        no service runs that does."""
        ...


def drives_of(pool: Path) -> PoolDrivesSource:
    layout = PoolLayout(pool.absolute())
    address = served_at(layout)
    return _Served(pool, address, served_as(layout)) if address else _AtRest(pool)


class _Served:
    def __init__(self, pool: Path, address: str, name: str) -> None:
        self._pool = pool
        self._admin = GrpcDriveAdmin(address, access_to(address), pool=name)

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(drive) for drive in self._admin.drives(deadline_s=_DEADLINE_S)]

    def add(self, size_bytes: int, data_path: Path | None, serial: str | None) -> tuple[int, int]:
        request = AddDriveRequest(size_bytes, "" if data_path is None else str(data_path), serial or "")
        with self._goes_on():
            added = self._admin.add_drive(request, deadline_s=_DEADLINE_S)
        return added.number, added.segment_count

    def drain(self, number: int, *, is_ended: bool) -> None:
        self._admin.drain_drive(DrainDriveRequest(number, is_ended=is_ended), deadline_s=_DEADLINE_S)

    def remove(self, number: int, config_path: Path | None = None) -> int:
        with self._goes_on():
            return self._admin.remove_drive(RemoveDriveRequest(number), deadline_s=_DEADLINE_S)

    def _goes_on(self) -> AbstractContextManager[None]:
        step = f"See how it stands: mfctl jbof drives {shlex.quote(str(self._pool))}"
        return told_when_interrupted("the service goes on with it", next_step=step)

    def _row(self, drive: DriveStatus) -> dict[str, Any]:
        pool = shlex.quote(str(self._pool))
        steps = {
            "gone": f"attach it, or give it up with what it holds: mfctl jbof remove {pool} {drive.number}",
            "drained": f"mfctl jbof remove {pool} {drive.number}",
            "failing": f"replace it: mfctl jbof replace {pool} {drive.number} --size SIZE --data-path DEVICE",
            "read_only": f"when it takes writes again: mfctl jbof drain --stop {pool} {drive.number}",
        }
        return {
            "number": drive.number,
            "state": drive.state,
            "segments": drive.segment_count,
            "size_bytes": drive.size_bytes,
            "serial": drive.serial,
            "path": drive.path,
            "percentage_used": drive.percentage_used if drive.percentage_used >= 0 else None,
            "months_left": drive.months_left if 0 <= drive.months_left < math.inf else None,
            "reasons": list(drive.reasons),
            "problem": drive.problem,
            "next_step": _WAIT if _WAITS & set(drive.reasons) else steps.get(drive.state, ""),
        }


class _AtRest:
    def __init__(self, pool: Path) -> None:
        self._pool = pool

    def rows(self) -> list[dict[str, Any]]:
        with drives_open(self._pool):
            found = find_drives(PoolLayout(self._pool.absolute()))
        rows: list[dict[str, Any]] = [
            {
                "number": drive.number,
                "state": "draining" if drive.is_draining else "here",
                "segments": drive.label.segment_count,
                "size_bytes": drive.geometry.capacity_bytes,
                "serial": drive.label.drive_name,
                "path": str(drive.path),
                "percentage_used": None,
                "months_left": None,
                "reasons": [],
                "problem": "; ".join(drive.label_problems),
                "next_step": "mfctl pool repair, when nobody uses the pool" if drive.label_problems else "",
            }
            for drive in found.here
        ]
        rows += [
            {
                "number": drive.number,
                "state": "away",
                "segments": 0,
                "size_bytes": 0,
                "serial": drive.name,
                "path": "",
                "percentage_used": None,
                "months_left": None,
                "reasons": [],
                "problem": drive.problem.message,
                "next_step": drive.problem.next_step,
            }
            for drive in found.absent
        ]
        return sorted(rows, key=lambda row: int(row["number"]))

    def add(self, size_bytes: int, data_path: Path | None, serial: str | None) -> tuple[int, int]:
        with drives_open(self._pool), Progress("zeroing", left=_NOT_ADDED) as progress:
            label = add_drive(
                self._pool,
                size_bytes=size_bytes,
                data_path=data_path,
                overwrite_serial=serial,
                tell=progress.update,
            )
        return label.drive_number, label.segment_count

    def drain(self, number: int, *, is_ended: bool) -> None:
        with drives_open(self._pool):
            set_draining(self._pool, number, is_draining=not is_ended)

    def remove(self, number: int, config_path: Path | None = None) -> int:
        served = None if config_path is None else exported_pool(self._pool, config_path)
        has_hosts = None if served is None else target_of(self._pool, served)
        with drives_open(self._pool):
            return remove_drive(self._pool, number, has_hosts=has_hosts)
