"""Value types of the administration of a served pool's drives. Nothing here does I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DriveStatus:
    """``state`` as :class:`~meshfusion.jbof.drives.life_words.State` names it; ``reasons``: why it is not simply
    online. ``problem``: what was found wrong with it last; "" for nothing. ``segment_count``: 0 while it was never
    here. ``percentage_used``: of its life, -1 where that is not known. ``months_left``: at the rate of the last day,
    infinite when nothing is written, -1 where it is not known. As the drive tells of its whole life, -1 where it does
    not: ``written_bytes`` by hosts, ``media_errors``, ``spare_percent``. ``write_budget_left_bytes``: that may be
    written now, -1 without a bound. Since the service began: ``failed_command_count``. ``read_latency_s``: of single
    blocks at the last look, the median; -1 before the first."""

    number: int
    state: str
    reasons: tuple[str, ...]
    path: str
    serial: str
    segment_count: int
    size_bytes: int
    percentage_used: int
    problem: str = ""
    months_left: float = -1.0
    written_bytes: int = -1
    media_errors: int = -1
    spare_percent: int = -1
    write_budget_left_bytes: int = -1
    failed_command_count: int = 0
    read_latency_s: float = -1.0


@dataclass(frozen=True, slots=True)
class AddDriveRequest:
    """``data_path``: an absolute path; "" for a file in the pool's directory. ``overwrite_serial``: what is on it may
    be overwritten if this is its drive's serial, or its own name; "" for only if it is blank."""

    size_bytes: int
    data_path: str = ""
    overwrite_serial: str = ""


@dataclass(frozen=True, slots=True)
class DrainDriveRequest:
    """``is_ended``: written again instead, and trusted again, whatever was held against it."""

    number: int
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class RemoveDriveRequest:
    number: int


class DriveAdmin(Protocol):
    """For operators. Each call can be repeated. They raise what the same raises on a pool at rest, and
    :class:`~meshfusion.jbof.errors.PoolBusyError` when somebody still uses what is to be removed."""

    def drives(self, *, deadline_s: float) -> tuple[DriveStatus, ...]: ...
    def add_drive(self, request: AddDriveRequest, *, deadline_s: float) -> DriveStatus: ...
    def drain_drive(self, request: DrainDriveRequest, *, deadline_s: float) -> DriveStatus: ...

    def remove_drive(self, request: RemoveDriveRequest, *, deadline_s: float) -> int:
        """How many chunks lay on it, and are forgotten."""
        ...
