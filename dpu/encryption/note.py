"""What a pool's directory says of its encryption: the file ``encryption``, JSON, for people to read, without secrets.

Each drive of such a pool is the mapping of a slice, and its path in the list of drives is the mapping's; which device
the slice is, and where its header lies, is said here only.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import os
import shlex
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_place import ENCRYPTION_NOTE, write_durably
from meshfusion.jbof.errors import FormatError, MediaError

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20
_PREFIX: Final = "meshfusion-"


class KeyState(enum.Enum):
    """ERASING: some headers are destroyed, maybe all; nothing opens any more."""

    IN_USE = "in use"
    ERASING = "erasing"
    ERASED = "erased"


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a pool's headers and its key are. Neither is the key."""

    header_dir: Path
    key_file: Path


@dataclass(frozen=True, slots=True)
class Slice:
    """``uuid``: of its header, and so of its mapping. ``device``: what is encrypted."""

    uuid: uuid.UUID
    device: Path

    @property
    def name(self) -> str:
        """Of its mapping."""
        return f"{_PREFIX}{self.uuid.hex}"

    @property
    def mapping_uuid(self) -> str:
        """That libcryptsetup gives the mapping (lib/setup.c, ``dm_prepare_uuid``)."""
        return f"CRYPT-LUKS2-{self.uuid.hex}-{self.name}"

    def header(self, header_dir: Path) -> Path:
        return header_dir / f"{self.uuid}.luks"


@dataclass(frozen=True, slots=True)
class EncryptionNote:
    """``erased_unix_s``: when; 0: it is not."""

    place: KeyPlace
    slices: tuple[Slice, ...]
    state: KeyState = KeyState.IN_USE
    erased_unix_s: int = 0

    def header(self, one: Slice) -> Path:
        return one.header(self.place.header_dir)

    def with_slices(self, added: tuple[Slice, ...]) -> EncryptionNote:
        return replace(self, slices=(*self.slices, *added))

    def without(self, gone: tuple[Slice, ...]) -> EncryptionNote:
        return replace(self, slices=tuple(one for one in self.slices if one not in gone))


def read_note(layout: PoolLayout) -> EncryptionNote | None:
    """None: the pool is not encrypted. Raises FormatError for a note that is damaged, and MediaError."""
    file = layout.directory / ENCRYPTION_NOTE
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MediaError(f"{file} cannot be read: {error.strerror}", next_step="check its permissions") from error
    try:
        return _decoded(json.loads(raw))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{file} is damaged: {error!r}",
            next_step="correct it (header_dir, key_file, and of each slice its header's uuid and its device); the "
            "headers' names are their uuids",
        ) from error


def write_note(layout: PoolLayout, note: EncryptionNote) -> None:
    """Durably, and all at once. Raises MediaError."""
    file = layout.directory / ENCRYPTION_NOTE
    content = {
        "version": _VERSION,
        "state": note.state.value,
        "erased_unix_s": note.erased_unix_s,
        "header_dir": str(note.place.header_dir),
        "key_file": str(note.place.key_file),
        "slices": [{"uuid": str(one.uuid), "device": str(one.device)} for one in note.slices],
    }
    try:
        write_durably(file, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise MediaError(f"{file} cannot be written: {error}", next_step="check space and permissions there") from error


@contextlib.contextmanager
def changing(layout: PoolLayout) -> Iterator[None]:
    """One change of the note at a time, by any process: between reading and writing it. Raises MediaError."""
    try:
        descriptor = os.open(layout.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise MediaError(f"{layout.directory} cannot be opened: {error}", next_step="check its permissions") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def refuse_erased(layout: PoolLayout, note: EncryptionNote | None) -> None:
    """Raises FormatError for a pool whose key is gone."""
    if note is None or note.state is KeyState.IN_USE:
        return
    path = shlex.quote(str(layout.directory))
    if note.state is KeyState.ERASED:
        raise FormatError(
            f"the key of the pool {layout.directory} was erased: nothing that it held can be read any more",
            next_step=f"remove its directory, rm -r {path}, and create a pool anew",
        )
    raise FormatError(
        f"the key of the pool {layout.directory} was being erased when that was interrupted",
        next_step=f"end it: mfctl pool erase-key {path} --yes",
    )


def _decoded(content: Any) -> EncryptionNote:
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']!r} instead of {_VERSION}")
    slices = tuple(Slice(uuid.UUID(one["uuid"]), Path(one["device"])) for one in content["slices"])
    place = KeyPlace(Path(content["header_dir"]), Path(content["key_file"]))
    if not all(path.is_absolute() for path in (place.header_dir, place.key_file, *(one.device for one in slices))):
        raise ValueError("a path is not absolute")
    if len({one.uuid for one in slices}) < len(slices):
        raise ValueError("a header's uuid is there twice")
    return EncryptionNote(place, slices, KeyState(content["state"]), int(content["erased_unix_s"]))
