"""The journals of flashes, as files: one for each card, which is also the lock that keeps two flashes of it apart."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.journal import Entry, entry_from_json, entry_to_json

DEFAULT_FOLDER: Final = Path("/var/lib/meshfusion/flash")
_MAX_NAME_CHARS: Final = 100


class JournalFile:
    """Of the card named ``card`` in ``folder``, which is made where it is missing. Raises CardError while another
    process has it, and OSError."""

    def __init__(self, folder: Path, card: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.sha256(card.encode()).hexdigest()[:8]  # two names may look alike without their signs
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', card)[-_MAX_NAME_CHARS:]}-{digest}"
        self._path = folder / f"{name}.json"
        self._lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            step = "Wait for it to end, or end it; then run the same command again."
            raise CardError(FaultKind.BUSY, "another process is flashing it", next_step=step) from error

    def read(self) -> Entry | None:
        try:
            return entry_from_json(self._path.read_text())
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def write(self, entry: Entry) -> None:
        """Durable when it returns: the card is reset next."""
        beside = self._path.with_suffix(".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(entry_to_json(entry))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)

    def close(self) -> None:
        os.close(self._lock)
