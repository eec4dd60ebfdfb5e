"""The dimensions of a modelled drive."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Isolation(enum.Enum):
    """Where garbage collection puts the pages it moves, on a drive with several placement handles.

    NVM Express 2.1 base specification, "Flexible Data Placement": reclaim unit handle types.
    """

    INITIALLY = "initially isolated"  # all moved pages share one write point, whatever handle wrote them
    PERSISTENTLY = "persistently isolated"  # moved pages stay with those of the handle that wrote them


@dataclass(frozen=True, slots=True)
class DriveGeometry:
    """A drive of ``superblock_count`` superblocks of ``superblock_pages`` pages each, of which it offers
    ``logical_pages`` to the host.

    ``handle_count``: placement handles the host may name, each with a superblock of its own; 1 is a drive without
    them. ``reserve_superblocks``: garbage collection runs while no more than these are free.
    """

    superblock_pages: int
    superblock_count: int
    logical_pages: int
    reserve_superblocks: int = 2
    handle_count: int = 1
    isolation: Isolation = Isolation.INITIALLY

    def __post_init__(self) -> None:
        assert self.superblock_pages > 0, self
        assert self.logical_pages > 0, self
        assert self.handle_count > 0, self
        assert self.reserve_superblocks >= 2, "one is filled by garbage collection before another becomes free"
        room = self.closed_superblocks * self.superblock_pages
        assert room > self.logical_pages, f"{self} has no page to spare: garbage collection could not end"
        assert self.physical_pages < 2**31, "page numbers have 32 bits"

    @property
    def physical_pages(self) -> int:
        return self.superblock_pages * self.superblock_count

    @property
    def write_points(self) -> int:
        """Superblocks that may be open at once: one for each handle, and those that moved pages go to."""
        return self.handle_count + (self.handle_count if self.isolation is Isolation.PERSISTENTLY else 1)

    @property
    def closed_superblocks(self) -> int:
        """How many hold the data when all write points are open and the reserve is free."""
        return self.superblock_count - self.write_points - self.reserve_superblocks

    @property
    def over_provisioning(self) -> float:
        """Physical pages beyond the logical ones, as a share of these: 0.07 is the usual 7 %."""
        return self.physical_pages / self.logical_pages - 1


def drive_of(
    *,
    logical_superblocks: int,
    superblock_pages: int,
    over_provisioning: float,
    handle_count: int = 1,
    isolation: Isolation = Isolation.INITIALLY,
) -> DriveGeometry:
    """A drive that offers ``logical_superblocks`` superblocks' worth of pages and has ``over_provisioning`` more."""
    return DriveGeometry(
        superblock_pages=superblock_pages,
        superblock_count=round(logical_superblocks * (1 + over_provisioning)),
        logical_pages=logical_superblocks * superblock_pages,
        handle_count=handle_count,
        isolation=isolation,
    )
