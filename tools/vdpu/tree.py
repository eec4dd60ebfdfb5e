"""The files of Debian packages as one tree, made without running anything of them: for a machine of another kind.

What their scripts would have done is added by whoever needs it (:mod:`meshfusion.tools.vdpu.system_files`).
"""

from __future__ import annotations

import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.tcg_image import ArchiveEntry

MERGED: Final = ("bin", "sbin", "lib")
"""Links into usr since Debian 12, whatever a package's own paths say."""
_DROPPED: Final = (
    "boot/System.map-", "boot/config-", "usr/lib/aarch64-linux-gnu/gconv/", "usr/lib/aarch64-linux-gnu/libperl.so.5.36",
    "usr/lib/aarch64-linux-gnu/perl/", "usr/lib/klibc/", "usr/lib/linux-image-", "usr/lib/udev/hwdb.d/",
    "usr/share/bug/", "usr/share/doc/", "usr/share/info/", "usr/share/lintian/", "usr/share/locale/", "usr/share/man/",
    "usr/share/perl/",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A file, folder or link. ``mode`` with its kind; ``data``: a file's content, a link's target."""

    mode: int
    data: bytes = b""


Tree = dict[str, Node]
"""By path, without a leading slash."""


def folder(mode: int = 0o755) -> Node:
    return Node(stat.S_IFDIR | mode)


def file(data: bytes | str, mode: int = 0o644) -> Node:
    return Node(stat.S_IFREG | mode, data if isinstance(data, bytes) else data.encode())


def link(target: str) -> Node:
    return Node(stat.S_IFLNK | 0o777, target.encode())


def unpacked(packages: Iterable[Path]) -> Tree:
    """All that ``packages`` hold but documentation. Raises LabError for one that cannot be read."""
    tree: Tree = {name: link(f"usr/{name}") for name in MERGED}
    for package in packages:
        for path, node in _of_package(package, tree):
            if path not in tree or not stat.S_ISDIR(node.mode):
                tree[path] = node
    return tree


def _of_package(package: Path, tree: Tree) -> Iterator[tuple[str, Node]]:
    with subprocess.Popen(("dpkg-deb", "--fsys-tarfile", str(package)), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield from _of_tar(process.stdout, tree)
        except tarfile.TarError as error:
            raise LabError(
                f"{package.name} cannot be unpacked: {error}", next_step="remove it, and run the same command again"
            ) from error
        finally:
            process.stdout.close()
            process.wait()


def _of_tar(stream: IO[bytes], tree: Tree) -> Iterator[tuple[str, Node]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = merged(member.name)
            if not path or path in MERGED or path.startswith(_DROPPED):
                continue
            if member.isdir():
                yield path, folder(member.mode)
            elif member.issym():
                yield path, link(member.linkname)
            elif member.islnk():
                yield path, tree[merged(member.linkname)]
            elif content := archive.extractfile(member):
                yield path, file(content.read(), member.mode)


def merged(path: str) -> str:
    """Where ``path`` of a package lies in a tree with :data:`MERGED` links."""
    plain = str(PurePosixPath("/", path))[1:]
    return f"usr/{plain}" if plain.partition("/")[0] in MERGED and "/" in plain else plain


def laid_over(tree: Tree, more: Mapping[str, Node]) -> Tree:
    """``more`` wins; folders that it needs are made."""
    result = dict(tree)
    for path, node in more.items():
        for parent in reversed(PurePosixPath(path).parents[:-1] if "/" in path else ()):
            result.setdefault(str(parent), folder())
        result[path] = node
    return result


def entries(tree: Mapping[str, Node]) -> Iterator[ArchiveEntry]:
    """For :func:`~meshfusion.tools.lab.tcg_image.cpio_archive`, folders before what is in them; all is root's."""
    for path in sorted(tree):
        yield ArchiveEntry(path, tree[path].mode, tree[path].data)
