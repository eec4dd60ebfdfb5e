"""From what a drive's pages say, and where it was found, to a :class:`~meshfusion.jbof.drives.drive.Drive`."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.jbof.drives.capabilities import Capabilities
from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Location
from meshfusion.jbof.drives.drive import Drive, DriveKind
from meshfusion.jbof.drives.health import EnduranceGroup, Health
from meshfusion.jbof.drives.identity import DriveIdentity
from meshfusion.jbof.drives.placement import FdpStatistics


@dataclass(frozen=True, slots=True)
class DriveReading:
    """What the pages of one namespace say. ``health_note``: why there is no ``health``."""

    identity: DriveIdentity
    capabilities: Capabilities
    firmware: str
    health: Health | None
    health_note: str
    endurance: EnduranceGroup | None
    fdp_statistics: FdpStatistics | None


def drive_of(
    reading: DriveReading,
    kind: DriveKind,
    where: str,
    location: Location,
    domain: FailureDomain,
    domains: DomainMap,
    users: tuple[str, ...] = (),
) -> Drive:
    """Of what its pages say and where it was found; ``domains``: of the configuration."""
    return Drive(
        identity=reading.identity,
        kind=kind,
        where=where,
        capabilities=reading.capabilities,
        location=location,
        domain=domains.placed(domain, serial=reading.identity.serial, slot=location.slot),
        health=reading.health,
        health_note=reading.health_note,
        endurance=reading.endurance,
        fdp_statistics=reading.fdp_statistics,
        firmware=reading.firmware,
        users=users,
    )
