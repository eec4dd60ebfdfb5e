"""This service as the one owner of its pool's drives (rule 2), beyond this machine's locks: by their reservations.

The lock on a file or device node (:mod:`meshfusion.dpu.owner_lock`) is held before anything here is asked, and is all
there is for a file, or a device that knows no reservations. What a reservation is and how it changes hands is in
:mod:`meshfusion.jbof.drives.ownership`. An index that another owner has overtaken meanwhile is told by the epoch on the
drive, not here (:func:`~meshfusion.dpu.pool_medium.refuse_old_index`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from meshfusion.dpu.drive_keys import DriveKeys
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_place import write_durably
from meshfusion.dpu.slices import physical_device
from meshfusion.jbof.drives import ownership
from meshfusion.jbof.drives.ownership import DriveOwnedError, OwnerRecords, Ownership
from meshfusion.jbof.drives.reservation import Reservations
from meshfusion.jbof.drives.system.block_reservations import BlockReservations
from meshfusion.jbof.drives.system.dm_mappings import below_encryption
from meshfusion.jbof.drives.system.medium_records import MediumRecords
from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES, RESERVATION_RECORD_LBA

logger = logging.getLogger("meshfusion.drives")

SERVICE_ID: Final = "service.id"


class ClosableReservations(Reservations, Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Reservable:
    """``device``: the physical drive, by whatever path and slice of it it is reached; "" where that is not known."""

    reservations: ClosableReservations
    records: OwnerRecords
    device: str = ""


# None: it has no reservations. Raises MediaError.
OpenReservable = Callable[[Path], Reservable | None]


@dataclass(frozen=True, slots=True)
class _Owned:
    drive: Reservable
    ownership: Ownership


class DriveOwners:
    """``service``: this one, over all its lives. ``may_take_over``: the operator says that whoever else holds a drive
    is dead, or is to be cut off. ``keys``: of all pools of the service. Does I/O; one thread at a time uses it."""

    def __init__(
        self,
        service: uuid.UUID,
        open_reservable: OpenReservable,
        *,
        may_take_over: bool,
        keys: DriveKeys | None = None,
    ) -> None:
        self._keys = keys or DriveKeys()
        self._service = service
        self._open_reservable = open_reservable
        self._may_take_over = may_take_over
        self._owned: dict[int, _Owned] = {}

    def take(self, number: int, path: Path) -> None:
        """From now on nobody else writes the drive. Again for one that has come back. Raises
        :class:`~meshfusion.jbof.drives.ownership.DriveOwnedError`, and MediaError."""
        self._forget(number)
        drive = self._open_reservable(path)
        if drive is None:
            return
        try:
            owned = self._take(drive)
        except UnsupportedError as error:  # its driver has the call, and the drive does not
            drive.reservations.close()
            logger.info("drive %d has the lock of this machine only: %s", number, error.message)
            return
        except MediaError as error:
            drive.reservations.close()
            if getattr(error.__cause__, "errno", None) not in (errno.EPERM, errno.EACCES):
                raise
            logger.warning("drive %d is not reserved, and another machine's service could write it: %s", number, error)
            return
        except DriveOwnedError as error:
            drive.reservations.close()
            raise DriveOwnedError(
                f"{path}: {error.message}",
                next_step="stop that service; when it is certain that it is dead: mfctl service run --takeover",
            ) from error
        except BaseException:
            drive.reservations.close()
            raise
        if owned.was_taken_over:
            logger.warning("drive %d was taken over: what its owner has under way there is aborted", number)
        self._owned[number] = _Owned(drive, owned)

    def _take(self, drive: Reservable) -> Ownership:
        with self._keys.turn(drive.device) as key:
            steps = ownership.take(self._service, key.key, may_take_over=self._may_take_over, is_shared=bool(key.users))
            owned: Ownership = ownership.carry_out(steps, drive.reservations, drive.records)
            key.users += 1
        return owned

    def has_lost(self, number: int) -> bool:
        """Does another hold it by now? As far as the drive can be asked."""
        owned = self._owned.get(number)
        if owned is None:
            return False
        steps = ownership.is_held(owned.ownership)
        try:
            return not ownership.carry_out(steps, owned.drive.reservations, owned.drive.records)
        except MeshFusionError:
            return False  # what is wrong with it, looks tell

    def release(self, number: int) -> None:
        """It leaves the pool: others may have it. One that is gone keeps its reservation until it is taken over."""
        owned = self._owned.get(number)
        if owned is not None:
            with self._keys.turn(owned.drive.device) as key, contextlib.suppress(MeshFusionError):
                steps = ownership.release(owned.ownership, is_shared=key.users > 1)
                ownership.carry_out(steps, owned.drive.reservations, owned.drive.records)
        self._forget(number)

    def close(self, late: Collection[int] = ()) -> None:
        """End in order: everything is durable, and nobody writes any more. The reservations stay. ``late``: drives of
        which that is not known, and that would not answer."""
        for number, owned in list(self._owned.items()):
            if number in late:
                logger.warning("drive %d does not know that this service has ended: it does not answer", number)
                continue
            try:
                steps = ownership.close(owned.ownership)
                ownership.carry_out(steps, owned.drive.reservations, owned.drive.records)
            except MeshFusionError as error:
                logger.warning("drive %d does not know that this service has ended in order: %s", number, error.message)
        self.abandon()

    def abandon(self) -> None:
        """End without a word: the next life of this service takes the drives as they are."""
        for number in list(self._owned):
            self._forget(number)

    def _forget(self, number: int) -> None:
        owned = self._owned.pop(number, None)
        if owned is not None:
            owned.drive.reservations.close()
            with self._keys.turn(owned.drive.device) as key:
                key.users -= 1


def open_block_reservable(path: Path) -> Reservable | None:
    """A block device's, through Linux. Without the right to ask for reservations the machine's lock must do, and that
    is told (:meth:`DriveOwners.take`). Of an encrypted one the device below it is reserved, since dm-crypt passes only
    part of the calls on; the owner's record is on the medium, and so encrypted."""
    if not path.is_block_device():
        return None
    records = MediumRecords(path, RESERVATION_RECORD_LBA * LBA_BYTES)
    return Reservable(BlockReservations.open(below_encryption(path)), records, physical_device(path))


def service_id(layout: PoolLayout) -> uuid.UUID:
    """Of whoever serves from this directory on this machine, whatever process that is. Raises MediaError.

    Of the machine, too: a copy of the directory elsewhere is not an earlier life of the same service.
    """
    return uuid.uuid5(_directory_id(layout), _machine_id())


def _machine_id() -> str:
    """machine-id(5); where there is none, the directory alone must do."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return ""


def _directory_id(layout: PoolLayout) -> uuid.UUID:
    """Made when there is none."""
    file = layout.directory / SERVICE_ID
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return uuid.UUID(file.read_text().strip())
        new = uuid.uuid4()
        write_durably(file, f"{new}\n")
    except OSError as error:
        raise MediaError(f"{file} cannot be made: {error}", next_step="check space and permissions there") from error
    return new
