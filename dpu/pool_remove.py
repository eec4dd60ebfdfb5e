"""Taking drives out of a pool that nobody serves: first no more is written to one, then it is given up."""

from __future__ import annotations

import shlex
import uuid
from dataclasses import replace
from pathlib import Path

from meshfusion.dpu.drive_list import DriveList, read_drive_list, write_drive_list
from meshfusion.dpu.encryption.making import slices_at, undo
from meshfusion.dpu.index_files import open_index
from meshfusion.dpu.index_proof import WHOLE_SCAN_S
from meshfusion.dpu.index_scan import scan_in_child
from meshfusion.dpu.owner_lock import OwnerLock
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives, list_of_one
from meshfusion.dpu.pool_rebuild import HasHosts, refuse_holders
from meshfusion.jbof.drives.system.luks import CRYPTSETUP, Luks
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.pool_addresses import MAX_DRIVE_SEGMENTS, first_segment


def set_draining(path: Path, number: int, *, is_draining: bool) -> None:
    """From its next start the service writes nothing new to that drive, or does again; what it holds is served.

    Raises PoolBusyError while somebody has the pool, and ConfigError for a drive that it does not have, or that is its
    only one.
    """
    layout = PoolLayout(path.absolute())
    found = find_drives(layout)
    owner = OwnerLock.take(layout, found.paths)
    try:
        listed = read_drive_list(layout.directory) or list_of_one(found)
        drive = listed.find(number)
        if drive is None:
            raise unknown_drive(layout, listed, number)
        if not is_draining and not drive.is_draining:
            return
        if is_draining and listed.only is not None:
            raise only_drive(layout)
        write_drive_list(layout.directory, listed.with_drive(replace(drive, is_draining=is_draining)))
    finally:
        owner.release()


def remove_drive(path: Path, number: int, *, has_hosts: HasHosts | None = None, luks: Luks = CRYPTSETUP) -> int:
    """Give the drive up, and with it the chunks on it: how many. It may be away. Its data is left as it is, but for a
    file in the pool's directory, which is deleted, and an encrypted drive, whose key is erased.

    Killed in between, it is to be done again; the pool does not open before. Raises PoolBusyError while somebody has
    the pool or may still write to it, and ConfigError for a drive that it does not have or that is its last, and when
    ``has_hosts`` is needed, since the pool was exported: None, it is not known.
    """
    layout = PoolLayout(path.absolute())
    found = find_drives(layout)
    owner = OwnerLock.take(layout, found.paths)
    try:
        listed = read_drive_list(layout.directory) or list_of_one(found)
        if number >= listed.next_number or number < 0:
            raise unknown_drive(layout, listed, number)
        if {drive.number for drive in listed.drives} == {number}:
            raise only_drive(layout)
        refuse_holders(layout, uuid.UUID(listed.pool_uuid), has_hosts, command="mfctl jbof remove")
        drive = listed.find(number)
        # Before the index: of a drive that is listed, segments that the index does not know would count as never used.
        write_drive_list(layout.directory, listed.without_drive(number))
        totals = scan_in_child(layout.index, listed.pool_uuid, listed.capacity_bytes, deadline_s=WHOLE_SCAN_S)
        first = first_segment(number)
        with open_index(
            layout.index, listed.pool_uuid, listed.capacity_bytes, payload_bytes=totals.payload_bytes
        ) as index:
            count = index.forget_drive(range(first, first + MAX_DRIVE_SEGMENTS))
        if drive is not None and drive.path.parent == layout.directory:
            drive.path.unlink(missing_ok=True)
        if drive is not None:
            undo(layout, slices_at(layout, (drive.path,), luks), luks)
        return count
    finally:
        owner.release()


def list_of(layout: PoolLayout) -> DriveList:
    listed = read_drive_list(layout.directory)
    if listed is None:
        raise only_drive(layout)
    return listed


def only_drive(layout: PoolLayout) -> ConfigError:
    """Who is asked to go without it."""
    add = f"mfctl jbof add {shlex.quote(str(layout.directory))} --size SIZE"
    return ConfigError(f"{layout.directory} has one drive", next_step=f"add another first: {add}")


def unknown_drive(layout: PoolLayout, listed: DriveList, number: int) -> ConfigError:
    numbers = ", ".join(str(drive.number) for drive in listed.drives)
    return ConfigError(
        f"{layout.directory} has no drive {number}",
        next_step=f"its drives are {numbers}: mfctl jbof drives {shlex.quote(str(layout.directory))}",
    )
