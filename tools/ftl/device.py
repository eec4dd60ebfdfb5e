"""A drive with a page-mapped flash translation layer: superblocks, greedy garbage collection, deallocate, handles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfusion.tools.ftl import kernels
from meshfusion.tools.ftl.geometry import DriveGeometry, Isolation


@dataclass(frozen=True, slots=True)
class DriveCounters:
    """Since the drive was new. ``moved_pages``: written by garbage collection; ``erases``: of superblocks."""

    host_pages: int
    moved_pages: int
    erases: int

    def __sub__(self, earlier: DriveCounters) -> DriveCounters:
        return DriveCounters(
            self.host_pages - earlier.host_pages,
            self.moved_pages - earlier.moved_pages,
            self.erases - earlier.erases,
        )

    @property
    def write_amplification(self) -> float:
        """Pages that the flash wrote for each page that the host wrote."""
        assert self.host_pages > 0, "nothing was written"
        return (self.host_pages + self.moved_pages) / self.host_pages


class FlashDrive:
    """A new drive: nothing written, every superblock free."""

    def __init__(self, geometry: DriveGeometry) -> None:
        self.geometry = geometry
        blocks, points = geometry.superblock_count, geometry.write_points
        numbers = np.zeros(kernels.NUMBERS, np.int64)
        numbers[kernels.SUPERBLOCK_PAGES] = geometry.superblock_pages
        numbers[kernels.HANDLES] = geometry.handle_count
        numbers[kernels.MOVED_POINTS] = geometry.handle_count if geometry.isolation is Isolation.PERSISTENTLY else 1
        numbers[kernels.RESERVE] = geometry.reserve_superblocks
        numbers[kernels.FREE_COUNT] = blocks
        self.tables = kernels.Tables(
            place=np.full(geometry.logical_pages, kernels.NOWHERE, np.int32),
            content=np.full(geometry.physical_pages, kernels.NOWHERE, np.int32),
            valid=np.zeros(blocks, np.int32),
            status=np.full(blocks, kernels.FREE, np.int8),
            owner=np.zeros(blocks, np.int16),
            erases=np.zeros(blocks, np.int32),
            open_block=np.full(points, kernels.NOWHERE, np.int32),
            next_page=np.zeros(points, np.int32),
            numbers=numbers,
        )

    def write(self, first_page: int, page_count: int, handle: int = 0) -> None:
        """Write ``page_count`` logical pages from ``first_page``, naming placement ``handle``."""
        self._check(first_page, page_count, handle)
        kernels.write_pages(self.tables, first_page, page_count, handle)

    def write_scattered(self, pages: npt.NDArray[np.int64], handle: int = 0) -> None:
        """Write these logical pages one by one, in this order."""
        if pages.size:
            self._check(int(pages.min()), 1, handle)
            self._check(int(pages.max()), 1, handle)
            kernels.write_scattered(self.tables, pages, handle)

    def deallocate(self, first_page: int, page_count: int) -> None:
        """The host needs these pages no longer (DSM deallocate, discard, TRIM)."""
        self._check(first_page, page_count, 0)
        kernels.deallocate_pages(self.tables, first_page, page_count)

    def counters(self) -> DriveCounters:
        numbers = self.tables.numbers
        return DriveCounters(
            host_pages=int(numbers[kernels.HOST_PAGES]),
            moved_pages=int(numbers[kernels.MOVED_PAGES]),
            erases=int(numbers[kernels.ERASES]),
        )

    @property
    def valid_pages(self) -> int:
        return int(self.tables.valid.sum())

    def _check(self, first_page: int, page_count: int, handle: int) -> None:
        assert first_page >= 0, first_page
        assert 0 < page_count <= self.geometry.logical_pages - first_page, (first_page, page_count)
        assert 0 <= handle < self.geometry.handle_count, handle
