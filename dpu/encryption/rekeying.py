"""Another key for an encrypted pool: nothing that it holds is written anew, since only what opens its headers changes.

The new key is added to all headers, then noted, then the old one is removed from all: what the note names opens every
header at any time, and a change that was interrupted is ended by doing it again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshfusion.dpu.encryption.key_file import open_key
from meshfusion.dpu.encryption.note import changing, read_note, refuse_erased, write_note
from meshfusion.dpu.encryption.slices import check_header
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.drives.system.luks import Luks
from meshfusion.jbof.errors import ConfigError, FormatError


def rekey(layout: PoolLayout, new_key_file: Path, luks: Luks, *, old_key_file: Path | None = None) -> int:
    """How many headers ``new_key_file`` opens now, and the old one does not. The pool may be served meanwhile.
    ``old_key_file`` None: as noted.

    Raises ConfigError for key files that do not fit, FormatError for a pool that is not encrypted or whose headers
    are not its own, and MediaError.
    """
    new_key_file = new_key_file.absolute()
    with changing(layout):
        note = read_note(layout)
        if note is None:
            raise FormatError(f"the pool {layout.directory} is not encrypted", next_step="name one that is")
        refuse_erased(layout, note)
        old_key_file = note.place.key_file if old_key_file is None else old_key_file.absolute()
        headers = [note.header(one) for one in note.slices]
        for one, header in zip(note.slices, headers, strict=True):
            check_header(one, header, luks)
        with open_key(old_key_file) as old, open_key(new_key_file) as new:
            missing = [header for header in headers if not luks.fits(header, new)]
            for header in headers:
                if header not in missing and luks.fits(header, old) and luks.header_of(header).slot_count < 2:
                    raise _same(new_key_file)
            for header in missing:
                if not luks.fits(header, old):
                    raise ConfigError(
                        f"neither {old_key_file} nor {new_key_file} opens the header {header}",
                        next_step="name the key file that does: --old-key-file",
                    )
            for header in missing:
                luks.add_key(header, old, new)
            write_note(layout, replace(note, place=replace(note.place, key_file=new_key_file)))
            for header in headers:
                while luks.fits(header, old):
                    assert luks.header_of(header).slot_count > 1, "the last key would go"
                    luks.remove_key(header, old)
    return len(headers)


def _same(new: Path) -> ConfigError:
    """Removing the old key would remove the new one."""
    return ConfigError(
        f"{new} holds the key that the pool has already",
        next_step=f"make another one: (umask 077; head -c 64 /dev/urandom > {new}.new)",
    )
