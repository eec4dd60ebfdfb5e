"""LUKS2 with its header off the drive, through cryptsetup(8). There is no maintained Python binding of its library.

Keys never enter this process: cryptsetup reads them from a descriptor that it inherits, and its arguments name that.

What is asked for: aes-xts-plain64 with a key of 512 bits, in sectors of 4096 bytes, which are the blocks of everything
on the medium; no dm-integrity, whose place digests have (rule 4). The key file is random (:mod:`meshfusion.dpu.
encryption.key_file` sees to its length), so that deriving a key from it need not be slow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from meshfusion.jbof.drives.system.dm_mappings import SYSFS, Mapping, find_mapping
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES

CIPHER: Final = "aes-xts-plain64"
KEY_BYTES: Final = 64
_ITERATIONS: Final = 100_000  # of PBKDF2: argon2id would take a GiB of memory, and a random key gains nothing by it
_KEYSLOTS_AREA: Final = ("--luks2-metadata-size", "16k", "--luks2-keyslots-size", "1m")  # 4 keys; 2 while one changes
_DEADLINE_S: Final = 120.0

# Exit codes, cryptsetup(8).
_WRONG_KEY: Final = 2
_BUSY: Final = 5
_NO_DEVICE_MAPPER: Final = ("Cannot initialize device-mapper", "Is dm_mod kernel module loaded", "Check that kernel")


class Key(Protocol):
    """Where a key can be read: ``descriptor`` of an open file, called ``path`` in messages."""

    @property
    def path(self) -> Path: ...
    @property
    def descriptor(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LuksHeader:
    """What a header says of the drive that it is of. ``offset_bytes``: where its data begins. ``slot_count``: keys that
    open it."""

    uuid: uuid.UUID
    cipher: str
    key_bytes: int
    sector_bytes: int
    offset_bytes: int
    slot_count: int

    @property
    def problem(self) -> str:
        """What makes it another header than :meth:`Cryptsetup.format` makes; "" for none."""
        found = (self.cipher, self.key_bytes, self.sector_bytes, self.offset_bytes)
        wanted = (CIPHER, KEY_BYTES, LBA_BYTES, 0)
        names = ("cipher", "key bytes", "sector bytes", "offset")
        wrong = [f"{n} {f!r} instead of {w!r}" for n, f, w in zip(names, found, wanted, strict=True) if f != w]
        return ", ".join(wrong)


def parse_header(uuid_text: str, metadata: str) -> LuksHeader:
    """From what ``cryptsetup luksUUID`` and ``luksDump --dump-json-metadata`` print. Raises ValueError.

    (LUKS2 on-disk format specification 1.1.1, chapter 3: keyslots and segments by their numbers.)"""
    try:
        content: Any = json.loads(metadata)
        (segment,) = content["segments"].values()
        key_bytes = {int(slot["key_size"]) for slot in content["keyslots"].values()}
        return LuksHeader(
            uuid.UUID(uuid_text.strip()),
            str(segment["encryption"]),
            key_bytes.pop() if len(key_bytes) == 1 else 0,
            int(segment["sector_size"]),
            int(segment["offset"]),
            len(content["keyslots"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks {error}") from error


class Luks(Protocol):
    """What of LUKS is used. All of it does I/O, and raises :class:`~meshfusion.jbof.errors.MediaError` for what fails,
    :class:`~meshfusion.jbof.errors.UnsupportedError` where this machine cannot do it, and
    :class:`~meshfusion.jbof.errors.ConfigError` for a key that does not fit."""

    def path_of(self, name: str) -> Path:
        """Of the mapping of that name, while it is open."""
        ...

    def format(self, device: Path, header: Path, key: Key, identity: uuid.UUID) -> None:
        """A new header, and with it a new volume key; nothing is written to ``device``."""
        ...

    def header_of(self, header: Path) -> LuksHeader:
        """Raises :class:`~meshfusion.jbof.errors.FormatError` for what is none."""
        ...

    def fits(self, header: Path, key: Key) -> bool: ...

    def open(self, device: Path, header: Path, key: Key, name: str) -> None: ...

    def mapping(self, name: str) -> Mapping | None:
        """None: it is not open."""
        ...

    def close(self, name: str) -> bool:
        """False: somebody uses it."""
        ...

    def add_key(self, header: Path, key: Key, new: Key) -> None: ...

    def remove_key(self, header: Path, key: Key) -> None: ...

    def erase(self, header: Path) -> None:
        """All its key slots: the volume key is in none of them any more."""
        ...

    def device_problem(self, device: Path) -> str:
        """Why it cannot be encrypted; "" when it can."""
        ...


@dataclass(frozen=True, slots=True)
class Cryptsetup:
    """:class:`Luks` through the command. ``mapper``: where mappings are found."""

    mapper: Path = Path("/dev/mapper")
    sysfs: Path = SYSFS

    def path_of(self, name: str) -> Path:
        return self.mapper / name

    def format(self, device: Path, header: Path, key: Key, identity: uuid.UUID) -> None:
        words = ("luksFormat", "--type", "luks2", "--cipher", CIPHER, "--key-size", str(KEY_BYTES * 8))
        sizes = ("--sector-size", str(LBA_BYTES), "--offset", "0", "--uuid", str(identity))
        self._run(
            (*words, *sizes, *_KEYSLOTS_AREA, *_DERIVED, *_from(key), "--header", str(header), str(device)),
            device,
            (key,),
        )

    def header_of(self, header: Path) -> LuksHeader:
        identity = self._asked(("luksUUID", str(header)), header)
        metadata = self._asked(("luksDump", "--dump-json-metadata", str(header)), header)
        try:
            return parse_header(identity, metadata)
        except ValueError as error:
            raise _no_header(header, str(error)) from error

    def fits(self, header: Path, key: Key) -> bool:
        done = self._command(("open", "--test-passphrase", *_from(key), str(header)), (key,))
        if done.returncode not in (0, _WRONG_KEY):
            raise _failed(done, header)
        return done.returncode == 0

    def open(self, device: Path, header: Path, key: Key, name: str) -> None:
        words = ("open", "--type", "luks2", "--allow-discards", *_from(key))
        self._run((*words, "--header", str(header), str(device), name), device, (key,))

    def mapping(self, name: str) -> Mapping | None:
        return find_mapping(name, self.sysfs)

    def close(self, name: str) -> bool:
        done = self._command(("close", name))
        if done.returncode and self.mapping(name) is not None:
            if done.returncode == _BUSY or "in use" in done.stderr:
                return False
            raise _failed(done, self.path_of(name))
        return True

    def add_key(self, header: Path, key: Key, new: Key) -> None:
        self._run(("luksAddKey", *_DERIVED, *_from(key), str(header), _descriptor(new)), header, (key, new))

    def remove_key(self, header: Path, key: Key) -> None:
        self._run(("luksRemoveKey", str(header), _descriptor(key)), header, (key,))

    def erase(self, header: Path) -> None:
        self._run(("erase", str(header)), header)

    def device_problem(self, device: Path) -> str:
        if not device.is_block_device():
            return "is no block device, and only such can be encrypted; a file's filesystem can lie on an encrypted one"
        with device.open("rb") as opened:
            size_bytes = os.lseek(opened.fileno(), 0, os.SEEK_END)
        if size_bytes % LBA_BYTES:
            return f"has {size_bytes} bytes, which are no whole blocks of {LBA_BYTES}"
        return ""

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(self, words: Sequence[str], what: Path, keys: Sequence[Key] = ()) -> str:
        done = self._command(words, keys)
        if done.returncode == _WRONG_KEY and keys:
            raise ConfigError(
                f"the key file {keys[0].path} does not open the header of {what}",
                next_step="name the key file that the pool was made with, or was given last (mfctl pool rekey)",
            )
        if done.returncode:
            raise _failed(done, what)
        return done.stdout

    def _asked(self, words: Sequence[str], header: Path) -> str:
        done = self._command(words)
        if done.returncode:
            raise _no_header(header, _reason(done))
        return done.stdout

    @staticmethod
    def _command(words: Sequence[str], keys: Sequence[Key] = ()) -> subprocess.CompletedProcess[str]:
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        program = shutil.which("cryptsetup", path=path)
        if program is None:
            raise UnsupportedError(
                "encryption at rest needs cryptsetup, which is not installed",
                next_step="install it: apt-get install cryptsetup-bin",
            )
        try:
            return subprocess.run(
                [program, "--batch-mode", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env={"PATH": path, "LC_ALL": "C"},
                pass_fds=[key.descriptor for key in keys],
                timeout=_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise MediaError(
                f"cryptsetup {words[0]} has not ended within {_DEADLINE_S:g} s",
                next_step="see the kernel's log for what is wrong with the drive",
            ) from error


CRYPTSETUP: Final = Cryptsetup()
_DERIVED: Final = ("--hash", "sha256", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", str(_ITERATIONS))


def _from(key: Key) -> tuple[str, ...]:
    return ("--key-file", _descriptor(key))


def _descriptor(key: Key) -> str:
    """Opened anew by cryptsetup, which so begins at the file's first byte."""
    return f"/proc/self/fd/{key.descriptor}"


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"exit code {done.returncode}"


def _failed(done: subprocess.CompletedProcess[str], what: Path) -> MediaError | UnsupportedError:
    words = f"cryptsetup {done.args[2]} of {what} failed: {_reason(done)}"
    if any(sign in done.stderr for sign in _NO_DEVICE_MAPPER):
        return UnsupportedError(words, next_step="run this as root, on a kernel with dm-crypt: modprobe dm-crypt")
    if done.returncode == _BUSY or "in use" in done.stderr:
        return MediaError(words, next_step=f"see who has it: lsblk {what}; fuser -v {what}")
    return MediaError(words, next_step="check that the device is there, and the space and permissions of its header")


def _no_header(header: Path, why: str) -> FormatError:
    return FormatError(
        f"{header} is no LUKS2 header of this service: {why}",
        next_step="put the pool's own header back; without it, what the pool holds cannot be read: create it anew",
    )
