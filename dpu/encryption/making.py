"""Encrypting slices that become a pool's drives, and giving that up again."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from meshfusion.dpu.encryption.destroying import destroy_header
from meshfusion.dpu.encryption.key_file import open_key
from meshfusion.dpu.encryption.note import EncryptionNote, KeyPlace, Slice, changing, read_note, write_note
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_place import CREATING, sync_directory
from meshfusion.dpu.slices import block_devices_under, device_number, devices_of_filesystem
from meshfusion.jbof.drives.system.luks import Luks
from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError

logger = logging.getLogger("meshfusion.encryption")


def check_can_encrypt(place: KeyPlace, devices: Collection[Path], luks: Luks) -> None:
    """Before anything is written. Raises ConfigError for a device, key file or directory that cannot be used."""
    for device in devices:
        problem = luks.device_problem(device)
        if problem:
            raise ConfigError(f"{device} {problem}", next_step="name a block device: a drive, partition or volume")
    if not place.header_dir.is_dir():
        raise ConfigError(
            f"header_dir = {place.header_dir} is no directory", next_step=f"mkdir -m 700 {place.header_dir}"
        )
    with open_key(place.key_file):
        pass
    for device in devices:
        if devices_of_filesystem(place.key_file) & {device_number(device), *block_devices_under(device)}:
            raise ConfigError(
                f"key_file = {place.key_file} lies on the drive that it protects, {device}: who has the drive would "
                "have the key",
                next_step="keep the key on another drive, or in memory and bring it there at each start",
            )


def encrypt(layout: PoolLayout, place: KeyPlace, devices: Sequence[Path], luks: Luks) -> tuple[Path, ...]:
    """Where they are found from now on, open, in the same order. What they held stays, and decrypts to noise. Noted
    before anything is made, so that nothing is left that nobody knows of.

    Raises as :func:`check_can_encrypt`, and MediaError; then all is undone.
    """
    check_can_encrypt(place, devices, luks)
    slices = tuple(Slice(uuid.uuid4(), device) for device in devices)
    with changing(layout):
        before = read_note(layout) or EncryptionNote(place, ())
        write_note(layout, before.with_slices(slices))
    try:
        with open_key(place.key_file) as key:
            for one in slices:
                header = one.header(place.header_dir)
                luks.format(one.device, header, key, one.uuid)
                _sync(header)
                luks.open(one.device, header, key, one.name)
    except BaseException:
        undo(layout, slices, luks)
        raise
    return tuple(luks.path_of(one.name) for one in slices)


def slices_at(layout: PoolLayout, paths: Collection[Path], luks: Luks) -> tuple[Slice, ...]:
    """Those of the pool's whose mappings are ``paths``."""
    note = read_note(layout)
    return () if note is None else tuple(one for one in note.slices if luks.path_of(one.name) in paths)


def undo(layout: PoolLayout, slices: Collection[Slice], luks: Luks) -> None:
    """They are no drives of the pool's any more: closed, their headers destroyed, forgotten. What is in the way is
    logged; the next who opens or erases the pool meets it again."""
    with changing(layout):
        note = read_note(layout)
        if note is None:
            return
        gone = []
        for one in slices:
            try:
                if not luks.close(one.name):
                    logger.warning("%s is still used: then: cryptsetup close %s", luks.path_of(one.name), one.name)
                destroy_header(note.header(one), luks)
                gone.append(one)
            except MeshFusionError as error:
                logger.warning("the key of %s is not erased: %s", one.device, error)
        with contextlib.suppress(MeshFusionError):
            write_note(layout, note.without(tuple(gone)))


def undo_all(layout: PoolLayout, luks: Luks) -> None:
    """Of a creation that has failed."""
    with contextlib.suppress(MeshFusionError):
        note = read_note(layout)
        if note is not None:
            undo(layout, note.slices, luks)


def close_all(layout: PoolLayout, luks: Luks) -> None:
    """Of a creation that is complete: whoever opens the pool opens them. Raises MediaError."""
    note = read_note(layout)
    for one in () if note is None else note.slices:
        luks.close(one.name)


def clear_remains(layout: PoolLayout, luks: Luks) -> None:
    """Of a creation in the same place that was killed: its mappings hold its slices."""
    if not (layout.directory / CREATING).is_dir() or layout.index.exists():
        return
    undo_all(layout, luks)


def _sync(header: Path) -> None:
    try:
        with header.open("rb") as opened:
            os.fsync(opened.fileno())
        sync_directory(header.parent)
    except OSError as error:
        raise MediaError(f"{header} cannot be made durable: {error}", next_step="check its filesystem") from error
