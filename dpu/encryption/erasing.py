"""The end of a tenant: the keys of its pool's slices are destroyed, and with them all that the pool held."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshfusion.dpu.encryption.destroying import destroy_header
from meshfusion.dpu.encryption.note import EncryptionNote, KeyState, changing, read_note, write_note
from meshfusion.dpu.encryption.slices import open_slices
from meshfusion.dpu.encryption.use_lock import UseLock
from meshfusion.dpu.owner_lock import lock_directory
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.drives.system.luks import Luks
from meshfusion.jbof.errors import FormatError, MeshFusionError, PoolBusyError
from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DirectMode, open_data_file


@dataclass(frozen=True, slots=True)
class ErasedKeys:
    """``blank``: slices whose first blocks are zeros now, so that they can become another pool's drives as they are.
    ``unproven``: those that could not be told to be the pool's, and were not touched. ``key_file``: it still exists."""

    headers: tuple[Path, ...]
    blank: tuple[Path, ...]
    unproven: tuple[Path, ...]
    key_file: Path


def note_to_erase(layout: PoolLayout) -> EncryptionNote:
    """What would be lost. Raises FormatError for a pool that is not encrypted, or whose key is gone."""
    note = read_note(layout)
    if note is None:
        raise FormatError(
            f"the pool {layout.directory} is not encrypted: it has no key that could be erased",
            next_step="what it holds is gone when its drives were wiped: rm -r its directory, and overwrite or format "
            "them",
        )
    if note.state is KeyState.ERASED:
        path = shlex.quote(str(layout.directory))
        raise FormatError(
            f"the key of the pool {layout.directory} was erased already",
            next_step=f"nothing is left to do: rm -r {path}",
        )
    return note


def erase_key(layout: PoolLayout, luks: Luks, now_unix_s: int) -> ErasedKeys:
    """After this no key opens what the pool held. Interrupted, it is to be done again, and opens no more.

    Raises as :func:`note_to_erase`, PoolBusyError while anybody uses the pool or has one of its mappings open, before
    anything is destroyed, and MediaError.
    """
    proven = _proven(layout, luks)
    with lock_directory(layout), _alone(layout), changing(layout):
        note = note_to_erase(layout)
        for one in note.slices:
            if not luks.close(one.name):
                raise PoolBusyError(
                    f"{luks.path_of(one.name)} is in use, and could be read there with its key erased",
                    next_step="end who uses it: a target that exports it, or an engine; lsblk and fuser -v show some",
                )
        write_note(layout, replace(note, state=KeyState.ERASING))
        headers = tuple(note.header(one) for one in note.slices)
        for header in headers:
            destroy_header(header, luks)
        blank = tuple(device for device in proven if _blank(device))
        write_note(layout, replace(note, state=KeyState.ERASED, erased_unix_s=now_unix_s))
    unproven = tuple(one.device for one in note.slices if one.device not in blank)
    return ErasedKeys(headers, blank, unproven, note.place.key_file)


def _proven(layout: PoolLayout, luks: Luks) -> tuple[Path, ...]:
    """Devices that are the pool's slices beyond doubt, since their headers decrypt them to its drives. Without a key
    that is not to be had, and the key is erased all the same."""
    note = note_to_erase(layout)
    try:
        opened = open_slices(layout, luks)
    except PoolBusyError:
        raise
    except MeshFusionError:
        return ()
    try:
        return tuple(one.device for one in note.slices if luks.mapping(one.name) is not None)
    finally:
        opened.close()


@contextlib.contextmanager
def _alone(layout: PoolLayout) -> Iterator[None]:
    use = UseLock.take(layout)
    try:
        if not use.is_alone:
            raise PoolBusyError(
                f"the encrypted drives of {layout.directory} are in use by a service or a command",
                next_step="stop that first",
            )
        yield
    finally:
        use.release()


def _blank(device: Path) -> bool:
    """What is left on it is noise; without it nobody has to be told to overwrite that. False: it cannot be written."""
    try:
        with (
            contextlib.closing(open_data_file(device, writable=True, direct=DirectMode.OFF)) as data,
            AlignedBuffer(DATA_START_LBA * LBA_BYTES) as zeros,
        ):
            data.write_from(0, zeros.view[: min(DATA_START_LBA, data.lba_count) * LBA_BYTES])
            data.flush()
    except MeshFusionError:
        return False
    return True
