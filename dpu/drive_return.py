"""A drive that comes to a served pool: for the first time, or back. It is owned, compared and opened as at a start."""

from __future__ import annotations

import threading
from dataclasses import replace

from meshfusion.dpu.index import Index
from meshfusion.dpu.pool_dir import read_label_at
from meshfusion.dpu.pool_drives import PoolDrive
from meshfusion.dpu.pool_medium import FileMedium, refuse_old_index
from meshfusion.dpu.pool_shelf import OpenDrive
from meshfusion.dpu.running_drives import RunningDrives, Sought
from meshfusion.jbof.epoch_record import last_epoch
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import OWNER_LBAS
from meshfusion.jbof.label import Label
from meshfusion.jbof.pool_addresses import drive_of_segment

_STEP = "attach the drive that the pool knows, or give it up: mfctl jbof remove POOL NUMBER"


def take_back(sought: Sought, drives: RunningDrives, index: Index, mutex: threading.Lock) -> None:
    """Does I/O; ``mutex`` is not held. Raises :class:`~meshfusion.jbof.errors.MeshFusionError` and changes nothing when
    it is not the drive that is sought, or cannot be had."""
    drives.answers.of(sought.number).check()
    label, problems = read_label_at(sought.path, _STEP)
    _check_label(sought, label, drives)
    drives.owner.take_data(drives.layout, sought.path)
    file = FileMedium.open(sought.path)
    try:
        if file.is_writable:
            drives.owners.take(sought.number, sought.path)
        _check_epoch(sought, file, label, drives, index)
        drive = PoolDrive(sought.path, label, problems, is_draining=False)
        medium = drives.media_of(drive, file)
        if file.is_writable:
            medium.write_owner()
        records = [r for r in index.segment_records() if drive_of_segment(r.segment) == sought.number]
        if any(record.segment not in drive.geometry.segments for record in records):
            raise FormatError(f"{sought.path} does not have the segments that the index names", next_step=_STEP)
    except BaseException:
        file.close()
        raise
    # Who writes to the former file may take its time, and the pool goes on meanwhile: not under the mutex.
    drives.medium.put(sought.number, medium)
    with mutex:
        former = drives.came(OpenDrive(drive, file, file.is_writable, has_epoch=file.is_writable), records)
    if former is not None:
        former.close()


def _check_label(sought: Sought, label: Label, drives: RunningDrives) -> None:
    if label.drive_uuid != sought.uuid or label.drive_number != sought.number:
        raise FormatError(
            f"{sought.path} is drive {label.drive_number} ({label.drive_uuid.hex()}), and drive {sought.number} "
            f"({sought.uuid.hex()}) should be there",
            next_step=_STEP,
        )
    known = sought.open.drive.label if sought.open is not None else None
    same = replace(label, created_unix_s=0)
    if known is not None and same != replace(known, created_unix_s=0):
        raise FormatError(f"the label of {sought.path} is not what it was", next_step=_STEP)
    geometry = drives.shelf.geometry
    if label.segment_lba_count * label.lba_bytes != geometry.segment_bytes or label.lba_bytes != geometry.lba_bytes:
        raise FormatError(f"{sought.path} has segments of another size than the pool", next_step=_STEP)


def _check_epoch(sought: Sought, file: FileMedium, label: Label, drives: RunningDrives, index: Index) -> None:
    """Nobody has owned it since it was here, and it is no older copy of itself (rule 2)."""
    if sought.open is None or not sought.open.has_epoch:
        refuse_old_index(file, label, index.epoch(), drives.layout.directory)
        return
    found = last_epoch([file.read_blocks(lba, 1) for lba in OWNER_LBAS], label)
    if found != drives.epoch:
        what = "another service has owned it meanwhile" if found > drives.epoch else "it is an older copy"
        raise FormatError(
            f"{sought.path} is not as this service left it: {what} (epoch {found} instead of {drives.epoch})",
            next_step="remove the drive from the pool and add it anew: mfctl jbof remove POOL NUMBER",
        )


__all__ = ["take_back"]
