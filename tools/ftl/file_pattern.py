"""What a cache of one file for each block writes through a journaling file system.

Files come and go by LRU, with hits between. Data is allocated in extents; each commit writes the metadata that changed
to the journal, and later in place (ordered data, as ext4 does by default).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshfusion.tools.ftl.device import FlashDrive
from meshfusion.tools.ftl.extents import Extent, FreeExtents

# ext4 with pages of 4 KiB: inodes have 256 bytes; a block bitmap covers 128 MiB; a directory entry takes some 64 bytes.
INODES_IN_PAGE: Final = 16
PAGES_IN_GROUP: Final = 32768
ENTRIES_IN_PAGE: Final = 64


@dataclass(frozen=True, slots=True)
class FilePattern:
    """``least_pages``, ``most_pages``: length of a file, uniform between them. ``full_share``: of the data area that
    files fill. ``hits_per_file``: how many files are read, and so become recent, for each one written.
    ``files_per_commit``: 1 where each file is synced. ``commits_per_checkpoint``: after how many commits changed
    metadata is written in place.
    """

    least_pages: int
    most_pages: int
    full_share: float = 0.9
    hits_per_file: float = 1.0
    files_per_commit: int = 32
    commits_per_checkpoint: int = 32
    journal_share: float = 0.004
    discards: bool = True


@dataclass(frozen=True, slots=True)
class _File:
    inode: int
    extents: tuple[Extent, ...]


class FileWriter:
    """Writes the pattern to a new ``drive``."""

    def __init__(self, pattern: FilePattern, drive: FlashDrive, generator: np.random.Generator) -> None:
        self.payload_pages = 0
        self._pattern = pattern
        self._drive = drive
        self._generator = generator
        total = drive.geometry.logical_pages
        self._journal_pages = max(round(total * pattern.journal_share), 64)
        self._most_inodes = total // pattern.least_pages + 1
        inode_pages = self._most_inodes // INODES_IN_PAGE + 1
        self._bitmaps_at = self._journal_pages + inode_pages
        self._entries_at = self._bitmaps_at + total // PAGES_IN_GROUP + 1
        self._entry_pages = self._most_inodes // ENTRIES_IN_PAGE + 1
        data_at = self._entries_at + self._entry_pages
        self._space = FreeExtents(data_at, total - data_at)
        self._kept_free = round((total - data_at) * (1 - pattern.full_share))
        assert self._kept_free > pattern.most_pages * (pattern.files_per_commit + 1), "what is freed waits for a commit"
        self._files: OrderedDict[int, _File] = OrderedDict()  # the least recent first
        self._free_inodes = list(range(self._most_inodes - 1, -1, -1))
        self._inodes: list[int] = []  # of files, in any order: to draw one
        self._place_of: dict[int, int] = {}
        self._journal_next = 0
        self._dirty: set[int] = set()  # metadata of the running commit
        self._behind: set[int] = set()  # metadata that is in the journal only
        self._freed: list[Extent] = []
        self._since_commit = 0
        self._commits = 0

    def extents(self) -> list[tuple[Extent, ...]]:
        """Of each file that is there, the least recent first."""
        return [file.extents for file in self._files.values()]

    @property
    def free_pages(self) -> int:
        """Of the data area, with what the next commit frees."""
        return self._space.free_pages + sum(extent.page_count for extent in self._freed)

    def write(self, file_count: int) -> None:
        """Write this many files, and remove what they push out."""
        for _ in range(file_count):
            self._hit()
            page_count = int(self._generator.integers(self._pattern.least_pages, self._pattern.most_pages + 1))
            while self.free_pages < self._kept_free + page_count:
                self._remove_oldest()
            self._create(page_count)
            self._since_commit += 1
            if self._since_commit >= self._pattern.files_per_commit:
                self._commit()

    def _hit(self) -> None:
        if self._inodes:
            count = self._generator.poisson(self._pattern.hits_per_file)
            for at in self._generator.integers(len(self._inodes), size=count):
                self._files.move_to_end(self._inodes[int(at)])

    def _create(self, page_count: int) -> None:
        inode = self._free_inodes.pop()
        file = _File(inode, tuple(self._space.take(page_count)))
        for extent in file.extents:
            self._drive.write(extent.first_page, extent.page_count)
        self._files[inode] = file
        self._place_of[inode] = len(self._inodes)
        self._inodes.append(inode)
        self._touch(file)
        self.payload_pages += page_count

    def _remove_oldest(self) -> None:
        inode, file = self._files.popitem(last=False)
        at, last = self._place_of.pop(inode), self._inodes.pop()
        if last != inode:
            self._inodes[at] = last
            self._place_of[last] = at
        self._free_inodes.append(inode)
        self._freed.extend(file.extents)
        self._touch(file)

    def _touch(self, file: _File) -> None:
        """Its inode, the bitmaps of its space, and its directory's page (entries lie by hash)."""
        self._dirty.add(self._journal_pages + file.inode // INODES_IN_PAGE)
        self._dirty.update(self._bitmaps_at + extent.first_page // PAGES_IN_GROUP for extent in file.extents)
        self._dirty.add(self._entries_at + int(self._generator.integers(self._entry_pages)))

    def _commit(self) -> None:
        """Descriptor, changed metadata and commit record go to the journal; freed space is free only now."""
        self._write_journal(len(self._dirty) + 2)
        self._behind |= self._dirty
        self._dirty.clear()
        for extent in self._freed:
            self._space.give_back(extent)
            if self._pattern.discards:
                self._drive.deallocate(extent.first_page, extent.page_count)
        self._freed.clear()
        self._since_commit = 0
        self._commits += 1
        if self._commits % self._pattern.commits_per_checkpoint == 0:
            self._drive.write_scattered(np.array(sorted(self._behind), np.int64))
            self._behind.clear()

    def _write_journal(self, page_count: int) -> None:
        """Append to the journal, which begins anew at its end."""
        while page_count:
            run = min(page_count, self._journal_pages - self._journal_next)
            self._drive.write(self._journal_next, run)
            self._journal_next = (self._journal_next + run) % self._journal_pages
            page_count -= run
