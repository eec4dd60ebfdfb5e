"""The slices of an encrypted pool, opened as the drives that it lies on, and closed again.

A mapping that is open already, which a killed service leaves, is used when it is proven to be the one that would be
made: of the header's UUID, on the slice's device. What a slice decrypts to is compared with the pool's list of drives
before anything is written there: a header does not say which drive it is of.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.encryption.key_file import open_key
from meshfusion.dpu.encryption.note import (
    EncryptionNote,
    KeyPlace,
    Slice,
    changing,
    read_note,
    refuse_erased,
    write_note,
)
from meshfusion.dpu.encryption.use_lock import UseLock
from meshfusion.dpu.pool_dir import PoolLayout, read_label_at
from meshfusion.dpu.slices import device_number
from meshfusion.jbof.drives.system.luks import Key, Luks
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError, MeshFusionError

logger = logging.getLogger("meshfusion.encryption")


class OpenSlices:
    """The pool's mappings, while this process uses them."""

    def __init__(self, layout: PoolLayout, luks: Luks, use: UseLock) -> None:
        self._layout = layout
        self._luks = luks
        self._use = use

    def close(self) -> None:
        """The last one who uses them closes them. One that somebody has open all the same, such as a target that
        exports it, stays, and that is told."""
        try:
            if not self._use.try_alone():
                return
            note = read_note(self._layout)
            for one in () if note is None else note.slices:
                if not self._luks.close(one.name):
                    logger.warning("%s", _stays_open(self._luks, one))
        except MeshFusionError as error:
            logger.warning("an encrypted drive of %s stays open: %s", self._layout.directory, error)
        finally:
            self._use.release()


def open_pools_slices(layout: PoolLayout, configured: KeyPlace | None, luks: Luks) -> OpenSlices | None:
    """For a service, of the pool that exists. None: it is not encrypted, and shall not be. Raises as
    :func:`check_configured` and :func:`open_slices`."""
    return None if check_configured(layout, configured) is None else open_slices(layout, luks, configured)


def check_configured(layout: PoolLayout, configured: KeyPlace | None) -> EncryptionNote | None:
    """Its note; None where the pool is not encrypted, and shall not be. ``configured`` None: it has no encryption.

    Raises ConfigError where only one of the two is so, FormatError for a key that was erased, and as :func:`read_note`.
    """
    note = read_note(layout)
    if note is None and configured is not None:
        path = shlex.quote(str(layout.directory))
        raise ConfigError(
            f"encryption is configured, and the pool {layout.directory} was made without: what it holds lies in the "
            "clear",
            next_step=f"remove encryption from its configuration; or have it made anew, empty: rm -r {path}, with "
            "create: true, and its drives blank",
        )
    refuse_erased(layout, note)
    if note is not None and configured is None:
        raise ConfigError(
            f"the pool {layout.directory} is encrypted, with its headers in {note.place.header_dir}, and its "
            "configuration has no encryption",
            next_step=f"add to its pool: encryption: {{header_dir: {note.place.header_dir}, key_file: "
            f"{note.place.key_file}}}",
        )
    return note


def look_at_slices(note: EncryptionNote, luks: Luks) -> tuple[str, ...]:
    """A warning where its drives are not open. Raises FormatError for headers that are not theirs, and nothing is
    changed."""
    closed = [one for one in note.slices if luks.mapping(one.name) is None]
    for one in closed:
        check_header(one, note.header(one), luks)
    devices = ", ".join(str(one.device) for one in closed)
    return (f"encrypted, and not open: what is on {devices} was not looked at",) if closed else ()


def open_slices(layout: PoolLayout, luks: Luks, place: KeyPlace | None = None) -> OpenSlices:
    """Of an encrypted pool. ``place``: where headers and key are by now; None: as was noted. One of several slices that
    is away, or does not belong to its header, is left out, and that is logged: its drive is away.

    Raises ConfigError for a key file that does not fit, FormatError for a key that was erased, and where no slice is
    left, what is wrong with the first: FormatError or MediaError.
    """
    use = UseLock.take(layout)
    opened: list[Slice] = []
    try:
        note = read_note(layout)
        assert note is not None, "the pool is encrypted"
        refuse_erased(layout, note)
        found = note if place is None else replace(note, place=place)
        if not use.is_alone and place is None and all(luks.mapping(one.name) for one in found.slices):
            return OpenSlices(layout, luks, use)  # whoever has them has proven them
        problems: list[MeshFusionError] = []
        with open_key(found.place.key_file) as key:
            for one in found.slices:
                try:
                    if open_slice(found, one, key, luks):
                        opened.append(one)
                    _check_decrypted(layout, found, one, luks)
                except (FormatError, MediaError) as error:
                    problems.append(error)
                    if one in opened:
                        luks.close(one.name)
        if len(problems) == len(found.slices) > 0:
            raise problems[0]
        for problem in problems:
            logger.error("an encrypted drive of %s is not opened: %s", layout.directory, problem)
        _note_place(layout, note, found.place)
    except BaseException:
        for one in opened:
            luks.close(one.name)
        use.release()
        raise
    use.share()
    return OpenSlices(layout, luks, use)


def open_slice(note: EncryptionNote, one: Slice, key: Key, luks: Luks) -> bool:
    """False: it was open. Raises as :func:`open_slices`."""
    header = note.header(one)
    if not one.device.exists():
        raise FormatError(
            f"{one.device} is missing, which an encrypted drive lies on",
            next_step="plug it in again, or correct its path in the file encryption of the pool's directory",
        )
    check_header(one, header, luks)
    if not luks.fits(header, key):
        raise ConfigError(
            f"the key file {key.path} does not open the header {header} of {one.device}",
            next_step="name the key file that the pool was made with, or was given last (mfctl pool rekey)",
        )
    mapping = luks.mapping(one.name)
    if mapping is not None:
        device = device_number(one.device)
        if mapping.uuid == one.mapping_uuid and mapping.devices == {device}:
            return False
        if mapping.uuid != one.mapping_uuid or not luks.close(one.name):
            raise FormatError(
                f"{luks.path_of(one.name)} is open already, as {mapping.uuid!r} on {', '.join(sorted(mapping.devices))}"
                f", and should be {one.mapping_uuid!r} on {device or one.device}",
                next_step=f"see who has it open and end that, then: cryptsetup close {one.name}",
            )
    luks.open(one.device, header, key, one.name)
    return True


def check_header(one: Slice, header: Path, luks: Luks) -> None:
    """Raises FormatError for one that is not the slice's."""
    if not header.exists():
        raise FormatError(
            f"the header {header} of {one.device} is missing",
            next_step="put it back, or correct header_dir; without it, what the pool holds cannot be read",
        )
    found = luks.header_of(header)
    if found.uuid != one.uuid:
        raise FormatError(
            f"{header} is the header of another slice: its UUID is {found.uuid}, and that of {one.device} is "
            f"{one.uuid}",
            next_step="put the slice's own header back: its name is its UUID",
        )
    if found.problem:
        raise FormatError(f"{header} is not as this service makes headers: {found.problem}", next_step="put it back")


def _check_decrypted(layout: PoolLayout, note: EncryptionNote, one: Slice, luks: Luks) -> None:
    """Does it hold the label of a drive of this pool? Raises FormatError."""
    path = luks.path_of(one.name)
    try:
        label, _ = read_label_at(path, "")
    except MediaError:
        return  # what is wrong with the drive is told when the pool is opened
    except FormatError as error:
        raise FormatError(
            f"what {one.device} holds is not what the header {note.header(one)} encrypts, or both copies of its label "
            f"are damaged: {error.message}",
            next_step=f"see whether {one.device} is the pool's drive by now, by its serial, and correct the device in "
            f"{layout.directory / 'encryption'}; write nothing to it",
        ) from error
    listed = read_drive_list(layout.directory)
    drive = None if listed is None else listed.find(label.drive_number)
    if listed is not None and (drive is None or drive.uuid != label.drive_uuid.hex() or drive.path != path):
        raise FormatError(
            f"{one.device} holds drive {label.drive_number} of another pool or another slice's",
            next_step=f"correct the device in {layout.directory / 'encryption'}",
        )


def _note_place(layout: PoolLayout, note: EncryptionNote, place: KeyPlace) -> None:
    """For commands, which read no configuration."""
    if place == note.place:
        return
    with changing(layout):
        now = read_note(layout)
        if now is not None:
            write_note(layout, replace(now, place=place))


def _stays_open(luks: Luks, one: Slice) -> str:
    return (
        f"{luks.path_of(one.name)} stays open, since something else uses it, such as the target that exports it: "
        "until that has ended and the mapping is closed, or the machine is restarted, the slice can be read there; "
        f"then: cryptsetup close {one.name}"
    )
