"""The files of one layer, in memory, and the tar archive that they become, which depends on nothing else."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import BinaryIO, Final

from meshfusion.tools.image.errors import BuildError

DIRECTORY: Final = stat.S_IFDIR
FILE: Final = stat.S_IFREG
SYMLINK: Final = stat.S_IFLNK


@dataclass(frozen=True, slots=True)
class Entry:
    """``path``: relative, without ``.`` and ``..``. ``mode``: kind and permissions, as in ``st_mode``. ``link``: target
    of a symbolic link. ``time_s``: seconds since 1970."""

    path: str
    mode: int
    data: bytes = b""
    link: str = ""
    owner: tuple[int, int] = (0, 0)
    time_s: int = 0

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        assert parts, "a path"
        assert ".." not in parts, self.path
        assert self.path == "/".join(parts), self.path

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


def directory(path: str, permissions: int = 0o755) -> Entry:
    return Entry(path, DIRECTORY | permissions)


def text_file(path: str, text: str, permissions: int = 0o644) -> Entry:
    return Entry(path, FILE | permissions, text.encode())


def symlink(path: str, target: str) -> Entry:
    return Entry(path, SYMLINK | 0o777, link=target)


@dataclass(slots=True)
class Tree:
    """``links``: directories that are symbolic links into ``usr``, for what is put below them."""

    links: frozenset[str] = frozenset()
    _entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, entry: Entry, origin: str) -> None:
        """``origin``: what it belongs to, for messages. Raises BuildError where another has put a file there."""
        first, _, rest = entry.path.partition("/")
        if first in self.links:
            if not rest and entry.is_directory:
                return  # the link stands for it
            if rest:
                entry = replace(entry, path=f"usr/{first}/{rest}")
        there = self._entries.get(entry.path)
        if there is not None and not (there.is_directory and entry.is_directory) and there != entry:
            raise BuildError(
                f"{origin}: /{entry.path} is in the image already, as another file",
                next_step="Take one of the two packages out of the lock.",
            )
        if there is None or not there.is_directory:
            self._entries[entry.path] = entry

    def add_all(self, entries: Iterable[Entry], origin: str) -> None:
        for entry in entries:
            self.add(entry, origin)

    @property
    def size_bytes(self) -> int:
        return sum(len(entry.data) for entry in self._entries.values())

    def entries(self) -> Iterator[Entry]:
        """By path, each behind the directory that it is in; those that nobody named are root's, 0755."""
        paths = dict(self._entries)
        for path, entry in self._entries.items():
            for parent in PurePosixPath(path).parents:
                if str(parent) != ".":
                    # Of its time too: a layer's bytes must not depend on more than its files.
                    paths.setdefault(str(parent), replace(directory(str(parent)), time_s=entry.time_s))
        return iter(paths[path] for path in sorted(paths, key=lambda path: PurePosixPath(path).parts))


def write_tar(tree: Tree, out: BinaryIO, moved: Callable[[int], object] = lambda _: None) -> None:
    """``moved``: told how many bytes of files were written since the last call."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in tree.entries():
            info = tarfile.TarInfo(entry.path)
            info.mode, info.mtime = stat.S_IMODE(entry.mode), entry.time_s
            info.uid, info.gid = entry.owner
            if entry.is_directory:
                info.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(entry.mode):
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            else:
                info.size = len(entry.data)
            archive.addfile(info, io.BytesIO(entry.data))
            moved(len(entry.data))
