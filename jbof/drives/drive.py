"""A drive as it was found, and what was found that cannot be one."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from meshfusion.jbof.drives.capabilities import Capabilities
from meshfusion.jbof.drives.domain import FailureDomain, Location
from meshfusion.jbof.drives.health import EnduranceGroup, Health
from meshfusion.jbof.drives.identity import DriveIdentity
from meshfusion.jbof.drives.placement import FdpStatistics


class DriveKind(enum.Enum):
    """How it is reached."""

    NVME = "nvme"  # through Linux' driver
    SPDK = "spdk"  # through SPDK's, as a bdev
    FILE = "file"  # a file or any block device, for trying


@dataclass(frozen=True, slots=True)
class Drive:
    """``where``: how it is reached now, a device node, a bdev or a file; no name to remember it by.

    ``health`` is None where nothing can be known: ``health_note`` says why. ``users``: what holds it besides us, such
    as partitions.
    """

    identity: DriveIdentity
    kind: DriveKind
    where: str
    capabilities: Capabilities
    location: Location
    domain: FailureDomain
    health: Health | None
    health_note: str = ""
    endurance: EnduranceGroup | None = None
    fdp_statistics: FdpStatistics | None = None
    firmware: str = ""
    users: tuple[str, ...] = ()

    @property
    def write_amplification(self) -> float | None:
        """What the drive adds to what was written, over its life; None where it does not tell."""
        found = [log.write_amplification for log in (self.fdp_statistics, self.endurance) if log is not None]
        return next((value for value in found if value is not None), None)


@dataclass(frozen=True, slots=True)
class Passed:
    """Something that was looked at and is not offered as a drive. ``reason`` and ``next_step`` are for people."""

    where: str
    reason: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Found:
    """``drives`` by identity; none twice."""

    drives: tuple[Drive, ...]
    passed: tuple[Passed, ...] = ()


class DriveSource(Protocol):
    """A place where drives are looked for."""

    def discover(self) -> Found:
        """All that is there now. Raises :class:`~meshfusion.jbof.errors.MeshFusionError` when the place as a whole
        cannot be looked at; what is wrong with a single drive is in :attr:`Found.passed`.
        """


def without_twins(drives: list[Drive]) -> Found:
    """Of drives with equal identities, none is offered: writing to one could be writing to both, or to the wrong one.

    Paths to one namespace are to be joined before.
    """
    by_identity: dict[DriveIdentity, list[Drive]] = {}
    for drive in drives:
        by_identity.setdefault(drive.identity, []).append(drive)
    passed = [
        Passed(
            ", ".join(drive.where for drive in twins),
            f"these have the same identity {identity}",
            "If they are paths to one drive, switch multipath on (nvme_core.multipath=Y); else give each namespace an "
            "NGUID of its own.",
        )
        for identity, twins in by_identity.items()
        if len(twins) > 1
    ]
    single = sorted((twins[0] for twins in by_identity.values() if len(twins) == 1), key=lambda drive: drive.identity)
    return Found(tuple(single), tuple(passed))
