"""Under which key a service reserves each physical drive: one for all slices of it, whichever of its pools they are of.

To a drive, a machine is one host with one key. Were each pool to register its own, the second would replace the first
one's, which would then take its drive for lost (:mod:`meshfusion.jbof.drives.ownership`).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_KEY_BITS: Final = 64


@dataclass(slots=True)
class DriveKey:
    """``users``: slices of the drive that are held under it."""

    key: int
    users: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)


class DriveKeys:
    """Of one life of a service. From any thread: who changes a registration has the drive's turn, since giving the last
    slice's up must not cross taking another."""

    def __init__(self) -> None:
        self._keys: dict[str, DriveKey] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, device: str) -> Iterator[DriveKey]:
        """``device``: of the drive; "" for one that is nobody else's, or of which that is not known."""
        with self._lock:
            found = self._keys.get(device) if device else None
            if found is None:
                found = DriveKey(secrets.randbits(_KEY_BITS) or 1)
                if device:
                    self._keys[device] = found
        with found.turn:
            if not found.users:  # it stands for a life that begins here
                found.key = secrets.randbits(_KEY_BITS) or 1
            yield found
