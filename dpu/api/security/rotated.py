"""What some files say, read again when they have changed; while they are bad, what they said before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from meshfusion.dpu.api.security.files import FileIdentity, identity_of
from meshfusion.jbof.errors import MeshFusionError

log = logging.getLogger("meshfusion.security")

T = TypeVar("T")

Tell = Callable[[str], None]  # of what people should know, besides the log

# Files that are bad by the date alone become good without a change.
_RETRY_S: Final = 60.0


def tell_nobody(text: str) -> None:
    """A :data:`Tell`."""


class Rotated(Generic[T]):
    """Safe for use by several threads. ``load`` raises :class:`~meshfusion.jbof.errors.MeshFusionError`; its first
    failure is the constructor's, later ones are logged, and ``tell`` is told of them, once for each change of the
    files."""

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], T],
        what: str,
        *,
        tell: Tell = tell_nobody,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._what = what
        self._tell = tell
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seen = self._identities()  # before reading: what changes meanwhile is read once more
        self._value = load()
        self._version = 1
        self._bad_since_s: float | None = None
        self._told = ""

    def current(self) -> tuple[T, int]:
        """The value, and a number that is another one when it is."""
        with self._lock:
            self._refresh()
            return self._value, self._version

    def _identities(self) -> tuple[FileIdentity, ...]:
        return tuple(map(identity_of, self._paths))

    def _refresh(self) -> None:
        found, now_s = self._identities(), self._now_s()
        is_changed = found != self._seen
        is_due = self._bad_since_s is not None and now_s - self._bad_since_s >= _RETRY_S
        if not is_changed and not is_due:
            return
        self._seen = found
        try:
            self._value = self._load()
        except MeshFusionError as error:
            self._bad_since_s = now_s
            if is_changed or error.message != self._told:
                log.error("%s: %s; what was read before is used on. Next step: %s", self._what, error.message,
                          error.next_step)  # fmt: skip
                self._tell(f"{self._what}: {error.message}; what was read before is used on")
            self._told = error.message
            return
        self._bad_since_s, self._told = None, ""
        self._version += 1
        log.info("%s: read anew", self._what)
