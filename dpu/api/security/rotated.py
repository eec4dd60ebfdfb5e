"""What some files say, read again when they have changed; while they are bad, what they said before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from meshfusion.dpu.api.security.files import FileIdentity, identity_of
from meshfusion.dpu.api.security.patient_work import PatientWork
from meshfusion.jbof.errors import MeshFusionError

log = logging.getLogger("meshfusion.security")

T = TypeVar("T")

Tell = Callable[[str], None]  # of what people should know, besides the log

# Files that are bad by the date alone become good without a change.
_RETRY_S: Final = 60.0
LOOK_DEADLINE_S: Final = 0.5
"""Files that have not been looked at for so long, since their disk does not answer, are waited for no more."""
FRESH_S: Final = 0.1
"""For files that every call asks for: a look is a thread's work, and lookups have 20 ms."""


def tell_nobody(text: str) -> None:
    """A :data:`Tell`."""


class Rotated(Generic[T]):
    """Safe for use by several threads. ``load`` raises :class:`~meshfusion.jbof.errors.MeshFusionError`; its first
    failure is the constructor's, later ones are logged, and ``tell`` is told of them, once for each change of the
    files. ``fresh_s``: so old may a look at them be. A disk that does not answer costs nobody more than
    :data:`LOOK_DEADLINE_S`: what was read before is used on, and that is told."""

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], T],
        what: str,
        *,
        tell: Tell = tell_nobody,
        fresh_s: float = 0.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._what = what
        self._tell = tell
        self._fresh_s, self._now_s = fresh_s, now_s
        self._looks = PatientWork("meshfusion-files")
        self._lock = threading.Lock()  # of the value, its version and whether the disk is silent
        self._looked_s = time.monotonic()  # when the last look that has ended began
        self._is_silent = False
        self._seen = self._identities()  # before reading: what changes meanwhile is read once more
        self._value = load()
        self._version = 1
        self._bad_since_s: float | None = None
        self._told = ""

    def current(self) -> tuple[T, int]:
        """The value, and a number that is another one when it is."""
        if not self._is_fresh(time.monotonic() - self._fresh_s):
            wanted_s = time.monotonic() - self._fresh_s
            try:
                self._looks.do(lambda: self._look(wanted_s), within_s=LOOK_DEADLINE_S)
            except TimeoutError:
                self._tell_silent()
        with self._lock:
            return self._value, self._version

    def _is_fresh(self, wanted_s: float) -> bool:
        with self._lock:
            return self._looked_s >= wanted_s

    def _look(self, wanted_s: float) -> None:
        """One at a time; several that waited for their turn need but one."""
        if self._is_fresh(wanted_s):
            return
        begun_s = time.monotonic()
        self._refresh()
        with self._lock:
            self._looked_s = begun_s
            was_silent, self._is_silent = self._is_silent, False
        if was_silent:
            log.warning("%s: its disk answers again", self._what)

    def _tell_silent(self) -> None:
        with self._lock:
            was_silent, self._is_silent = self._is_silent, True
        if not was_silent:
            text = f"{self._what}: its disk does not answer; what was read before is used on"
            log.error("%s", text)
            self._tell(text)

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
            value = self._load()
        except MeshFusionError as error:
            self._bad_since_s = now_s
            if is_changed or error.message != self._told:
                log.error("%s: %s; what was read before is used on. Next step: %s", self._what, error.message,
                          error.next_step)  # fmt: skip
                self._tell(f"{self._what}: {error.message}; what was read before is used on")
            self._told = error.message
            return
        self._bad_since_s, self._told = None, ""
        with self._lock:
            self._value = value
            self._version += 1
        log.info("%s: read anew", self._what)
