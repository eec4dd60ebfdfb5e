"""A Debian package's files and what it says of itself, without installing it and without running anything of it."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.image.commands import run_command
from meshfusion.tools.image.tree import DIRECTORY, FILE, SYMLINK, Entry, text_file

_DEADLINE_S: Final = 300.0
_SHARE: Final = ("bash-completion", "bug", "info", "lintian", "locale", "man", "menu", "zsh")
# Documentation stays out, but for the licences, which must go along.
_LEFT_OUT: Final = re.compile(rf"usr/share/(?:(?:{'|'.join(_SHARE)})(?:/|$)|doc(?!/[^/]+/copyright$))")
_KINDS: Final = {tarfile.DIRTYPE: DIRECTORY, tarfile.REGTYPE: FILE, tarfile.AREGTYPE: FILE, tarfile.SYMTYPE: SYMLINK}


@dataclass(frozen=True, slots=True)
class DebControl:
    """``text``: all of its control file."""

    name: str
    version: str
    architecture: str
    depends: tuple[str, ...]
    text: str


def deb_control(path: Path) -> DebControl:
    """Raises BuildError where ``path`` is no Debian package."""
    text = run_command(
        ("dpkg-deb", "--field", str(path)), about=f"reading {path.name}", deadline_s=_DEADLINE_S, install="dpkg"
    ).decode()
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and line[0] != " ")
    wanted = ", ".join(fields[name] for name in ("Pre-Depends", "Depends") if name in fields)
    depends = tuple(part.strip() for part in wanted.split(",") if part.strip())
    return DebControl(fields["Package"], fields["Version"], fields["Architecture"], depends, text)


def deb_entries(path: Path) -> Iterator[Entry]:
    """Its files but for documentation, and its control file where scanners of images look for it.

    Raises BuildError where ``path`` is no Debian package.
    """
    control = deb_control(path)
    yield text_file(f"var/lib/dpkg/status.d/{control.name}", control.text)
    data = run_command(
        ("dpkg-deb", "--fsys-tarfile", str(path)), about=f"unpacking {path.name}", deadline_s=_DEADLINE_S,
        install="dpkg",
    )  # fmt: skip
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            name = member.name.removeprefix("./").strip("/")
            if name in ("", ".") or _LEFT_OUT.match(name):
                continue
            yield _entry(archive, member, name)


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> Entry:
    # A hard link becomes a file of its own: extractfile follows it.
    kind = FILE if member.islnk() else _KINDS[member.type]
    content = archive.extractfile(member) if kind == FILE else None
    return Entry(
        name, kind | member.mode, data=b"" if content is None else content.read(),
        link=member.linkname if member.issym() else "", owner=(member.uid, member.gid), time_s=int(member.mtime),
    )  # fmt: skip
