"""One owner per drive (rule 2): how a service becomes it, takes it over from a dead one, and hands it on.

The drive's reservation keeps other machines from writing; a record on the medium, the owner's *epoch*, tells later
owners of earlier ones. The record is read and written only while the reservation is held, so that nobody else's write
can come between. :func:`take` is a generator: it yields one :data:`Step` after another, gets the answers, and returns
the :class:`Ownership`; :func:`carry_out` does the steps. ::

    register our key -> reserve --------------------------> read the record -> write epoch + 1 -> owner
                          | another holds it                        ^
                          '-> (if it ended in order, is an earlier  |
                              life of ours, or if takeover is       |
                              allowed) preempt and abort it ------->'

A reservation is never given back while the drive is a pool's: an owner that ends in order only says so in its record.
On a drive without a reservation an earlier owner that was thought dead, and comes to itself, could write. For the same
reason a drive should keep reservations through a loss of power (``PERSISTS`` of its capabilities).

Write Exclusive is the type: only the holder writes, and everybody may read, as `mfctl` does beside an owner. Under the
types for registrants, a service that has registered and not yet been refused could write.

An earlier life of the same service is no other owner, also where the drive sees another host in it: a user-space driver
may have a new host identifier with each start.

Two processes of one machine are one host to a drive: they are kept apart by a lock of the machine, which is taken
before (:mod:`meshfusion.jbof.drives.system.file_lock`).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from meshfusion.jbof.drives.reservation import ReservationConflictError, Reservations
from meshfusion.jbof.errors import MediaError, PoolBusyError
from meshfusion.jbof.nvme.reservations import Registrant, ReservationReport, ReservationType

KIND: Final = ReservationType.WRITE_EXCLUSIVE
_MAX_PREEMPTIONS: Final = 3


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """On the medium. ``epoch`` only ever grows. ``is_clean``: its owner ended in order, so nothing is to be rebuilt."""

    epoch: int
    owner: uuid.UUID
    key: int
    is_clean: bool


class OwnerRecords(Protocol):
    """Where the record of one drive lies. Both raise :class:`~meshfusion.jbof.errors.MeshFusionError`."""

    def read(self) -> OwnerRecord | None:
        """None: the drive has had no owner."""

    def write(self, record: OwnerRecord) -> None:
        """Durable when it returns."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """``needs_rebuild``: the owner before did not end in order, so only the medium tells what is on it."""

    record: OwnerRecord
    needs_rebuild: bool
    was_taken_over: bool


@dataclass(frozen=True, slots=True)
class Register:
    key: int


@dataclass(frozen=True, slots=True)
class Unregister:
    key: int


@dataclass(frozen=True, slots=True)
class Acquire:
    key: int


@dataclass(frozen=True, slots=True)
class PreemptAndAbort:
    key: int
    victim_key: int


@dataclass(frozen=True, slots=True)
class Report:
    """Answered by a :class:`ReservationReport`, or None."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Answered by an :class:`OwnerRecord`, or None."""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    record: OwnerRecord


Step = Register | Unregister | Acquire | PreemptAndAbort | Report | ReadRecord | WriteRecord
Taking = Generator[Step, Any, Ownership]


class DriveOwnedError(PoolBusyError):
    """Another service owns the drive, or took it."""


def take(owner: uuid.UUID, key: int, *, may_take_over: bool, is_shared: bool = False) -> Taking:
    """``owner``: the service, over all its lives, of which the machine's lock lets one be at a time. ``key``: random,
    not 0, never used before: it stands for this life. ``is_shared``: other slices of the drive are held under it by
    this process already: registering and reserving again change nothing then, and it is kept whatever becomes of this.

    Raises :class:`DriveOwnedError` while another service owns the drive, unless ``may_take_over``; that must be said
    only when it is known to be dead, or is to be cut off. The host that held it loses what it has under way.
    """
    assert 0 < key < 1 << 64
    try:
        yield Register(key)
    except ReservationConflictError as error:  # of the machine's lock: a drive lets any host register
        raise DriveOwnedError(error.message, next_step=error.next_step) from error
    try:
        was_taken_over = yield from _reserved(owner, key, may_take_over=may_take_over)
    except Exception:
        if not is_shared:
            yield from _withdraw(key)
        raise
    before: OwnerRecord | None = yield ReadRecord()
    epoch = 1 if before is None else before.epoch + 1
    record = OwnerRecord(epoch, owner, key, is_clean=False)
    yield WriteRecord(record)
    return Ownership(record, needs_rebuild=before is not None and not before.is_clean, was_taken_over=was_taken_over)


def close(ownership: Ownership) -> Generator[Step, Any, None]:
    """End in order, after everything that was written is durable: the next owner need not rebuild, nor be allowed to
    take over. Raises :class:`ReservationConflictError` when the drive was lost before.
    """
    yield WriteRecord(dataclasses.replace(ownership.record, is_clean=True))


def release(ownership: Ownership, *, is_shared: bool = False) -> Generator[Step, Any, None]:
    """As :func:`close`, for a drive that leaves the pool: its reservation ends, so that others may write it; not where
    other slices of it are held under the same key."""
    yield from close(ownership)
    if not is_shared:
        yield Unregister(ownership.record.key)


def is_held(ownership: Ownership) -> Generator[Step, Any, bool]:
    """Whether it still is the owner, as far as the drive can be asked."""
    report: ReservationReport | None = yield Report()
    return report is None or (report.holder is not None and report.holder.key == ownership.record.key)


def carry_out(steps: Generator[Step, Any, Any], reservations: Reservations, records: OwnerRecords) -> Any:
    """Do the steps one after the other; what they raise, the procedure hears of. Returns what it returns."""
    try:
        step = next(steps)
        while True:
            try:
                answer = _do(step, reservations, records)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value


def _do(step: Step, reservations: Reservations, records: OwnerRecords) -> object:
    match step:
        case Register(key):
            reservations.register(key)
        case Unregister(key):
            reservations.unregister(key)
        case Acquire(key):
            reservations.acquire(key, KIND)
        case PreemptAndAbort(key, victim_key):
            reservations.preempt_and_abort(key, victim_key, KIND)
        case Report():
            return reservations.report()
        case ReadRecord():
            return records.read()
        case WriteRecord(record):
            records.write(record)
    return None


def _reserved(owner: uuid.UUID, key: int, *, may_take_over: bool) -> Generator[Step, Any, bool]:
    """Whether the drive was taken from an owner that had not ended in order."""
    was_taken_over = False
    for _ in range(_MAX_PREEMPTIONS):
        if (yield from _acquired(key)):
            report: ReservationReport | None = yield Report()
            if report is not None and (report.holder is None or report.holder.key != key):
                raise _lost()
            return was_taken_over
        record: OwnerRecord | None = yield ReadRecord()
        holder = yield from _holder(key, record)
        is_recorded = record is not None and holder is not None and holder.key == record.key
        has_ended = is_recorded and record is not None and (record.is_clean or record.owner == owner)
        if not may_take_over and not has_ended:
            raise _owned(holder)
        if holder is None:
            raise _nameless()
        if (yield from _preempted(key, holder.key)):
            was_taken_over |= not has_ended
    raise _lost()


def _acquired(key: int) -> Generator[Step, Any, bool]:
    try:
        yield Acquire(key)
    except ReservationConflictError:
        return False
    return True


def _preempted(key: int, victim_key: int) -> Generator[Step, Any, bool]:
    """A conflict: somebody else was faster, or the victim has just gone. Then it is tried again from reserving on."""
    try:
        yield PreemptAndAbort(key, victim_key)
    except ReservationConflictError:
        return False
    return True


def _holder(key: int, record: OwnerRecord | None) -> Generator[Step, Any, Registrant | None]:
    """Who is in the way, by the drive's report; where it has none, by the record of the last owner. None: not told."""
    report: ReservationReport | None = yield Report()
    if report is not None:
        if report.holder is not None and report.holder.key != key:
            return report.holder
        raise _lost()  # it changes hands just now
    if record is None or record.key == key:
        return None
    return Registrant(record.key, record.owner.bytes, is_holder=True)


def _withdraw(key: int) -> Generator[Step, Any, None]:
    """Leave no key behind. One that stays can do nothing, and the next life of this service replaces it."""
    try:
        yield Unregister(key)
    except MediaError:
        return


def _nameless() -> MediaError:
    return MediaError(
        "the drive is reserved by another host, and neither the drive nor its medium tells by which key",
        next_step="Release it where it was reserved, or clear it with the drive's own tools (sg_persist, nvme).",
    )


def _owned(holder: Registrant | None) -> DriveOwnedError:
    who = "" if holder is None else f": host {holder.host.hex()}, key {holder.key:016x}"
    return DriveOwnedError(
        f"the drive is owned by another service{who}",
        next_step="Stop that service; or, when it is certain that it is dead, take the drive over.",
    )


def _lost() -> DriveOwnedError:
    return DriveOwnedError(
        "the drive changed hands while it was being taken",
        next_step="See which other service was told to take it; then try again.",
    )
