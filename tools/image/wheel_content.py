"""A wheel's files at the places where the image's Python looks for them, and what the wheel says of itself."""

from __future__ import annotations

import email.parser
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.image.architecture import PYTHON
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.tree import FILE, Entry

SITE: Final = f"usr/local/lib/python{PYTHON}/dist-packages"
INTERPRETER: Final = f"/usr/bin/python{PYTHON}"
_SECTIONS: Final = {"purelib": SITE, "platlib": SITE, "scripts": "usr/local/bin", "data": "usr/local"}
_TIME_S: Final = 315_532_800  # 1980-01-01, the earliest of a zip; theirs have no time zone


@dataclass(frozen=True, slots=True)
class WheelMetadata:
    """``licence``: "" where it says none."""

    name: str
    version: str
    licence: str


def wheel_metadata(path: Path, name: str) -> WheelMetadata:
    """``name``: of the package, for messages. Raises BuildError where it is no wheel."""
    with _opened(path, name) as archive:
        found = [member for member in archive.namelist() if member.endswith(".dist-info/METADATA")]
        if len(found) != 1:
            raise BuildError(f"{name}: is no wheel: it has no METADATA", next_step="Take another release of it.")
        fields = email.parser.BytesHeaderParser().parsebytes(archive.read(found[0]))
    return WheelMetadata(fields["Name"], fields["Version"], fields.get("License-Expression", ""))


def wheel_entries(path: Path, name: str) -> Iterator[Entry]:
    """Of what PEP 427 calls unpacking and spreading. Raises BuildError where it is no wheel."""
    with _opened(path, name) as archive:
        for member in archive.infolist():
            place = None if member.is_dir() else _place(member.filename)
            if place is None:
                continue
            is_executable = bool((member.external_attr >> 16) & stat.S_IXUSR) or place.startswith("usr/local/bin/")
            data = _with_interpreter(archive.read(member))
            yield Entry(place, FILE | (0o755 if is_executable else 0o644), data=data, time_s=_TIME_S)


def _opened(path: Path, name: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise BuildError(f"{name}: is no wheel", next_step="Take another release of it.") from None


def _place(name: str) -> str | None:
    """None: not for the image."""
    if ".." in name.split("/") or name.startswith("/"):
        raise BuildError(f"a wheel has a file outside of it: {name}", next_step="Take another release of it.")
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return f"{SITE}/{name}"
    section, _, below = rest.partition("/")
    return f"{_SECTIONS[section]}/{below}" if section in _SECTIONS and below else None


def _with_interpreter(data: bytes) -> bytes:
    """Scripts begin with ``#!python`` (PEP 427)."""
    first, newline, rest = data.partition(b"\n")
    return b"#!" + INTERPRETER.encode() + newline + rest if first in (b"#!python", b"#!pythonw") else data
