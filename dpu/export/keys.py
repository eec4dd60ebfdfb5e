"""Secrets of worker incarnations, each in a file that the target reads, gone with its incarnation: of DH-HMAC-CHAP, and
of TLS."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.dpu.export.desired import HostKey
from meshfusion.dpu.pool_place import write_durably
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.auth_keys import format_secret, key_id, new_secret, parse_secret
from meshfusion.jbof.nvme.tls_psk import new_psk, parse_psk

_MODE: Final = 0o600
"""As SPDK wants them."""


@dataclass(frozen=True, slots=True)
class KeyKind:
    """``new_text``: of a new secret. ``check`` raises for a text that is damaged."""

    suffix: str
    new_text: Callable[[], str]
    check: Callable[[str], object]


CHAP: Final = KeyKind(".key", lambda: format_secret(new_secret()), parse_secret)
PSK: Final = KeyKind(".psk", new_psk, parse_psk)


class HostKeys:
    """``folder``: only its owner may enter it. From any thread.

    A key that takes the place of another one is durable in its file before a target is told of it. Whenever this
    process ends, what the file says is what is desired, and the target is brought to that.
    """

    def __init__(self, folder: Path, kind: KeyKind = CHAP) -> None:
        self._folder, self._kind = folder, kind
        self._lock = threading.Lock()  # so that a key is not replaced while it goes
        self._ids: dict[str, str] = {}

    def path(self, incarnation: str) -> Path:
        return self._folder / f"{incarnation}{self._kind.suffix}"

    def make(self, incarnation: str) -> None:
        """A new key, unless there is one. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        text = self._kind.new_text()
        try:
            descriptor = os.open(self.path(incarnation), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            return
        except OSError as error:
            raise _trouble(self.path(incarnation), error) from error
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError as error:
            self.forget(incarnation)
            raise _trouble(self.path(incarnation), error) from error

    def replace(self, incarnation: str) -> None:
        """Another key in the place of that which is there; nothing for one that has none. It is durable when this
        returns. Raises MediaError: then whichever of the two is there is whole."""
        with self._lock:
            path = self.path(incarnation)
            if not path.exists():
                return
            text = self._kind.new_text()
            try:
                write_durably(path, text, mode=_MODE)
            except OSError as error:
                self._ids.pop(incarnation, None)  # it may have been done
                raise _trouble(path, error) from error
            self._ids[incarnation] = key_id(text)

    def read(self, incarnation: str) -> str:
        """Its text. Raises :class:`~meshfusion.jbof.errors.MediaError`, or what a damaged key raises."""
        try:
            text = self.path(incarnation).read_text().strip()
        except OSError as error:
            raise _trouble(self.path(incarnation), error) from error
        self._kind.check(text)
        return text

    def wanted(self, incarnation: str) -> HostKey:
        """What its target shall ask for. Never waits for a key that is being replaced."""
        path, known_id = self.path(incarnation), self._ids.get(incarnation)
        if known_id is None:
            try:
                text = self.read(incarnation)
            except (MeshFusionError, UnicodeDecodeError):  # the step that needs it tells why
                return HostKey(path)
            known_id = self._ids.setdefault(incarnation, key_id(text))  # one that came meanwhile goes before
        return HostKey(path, known_id)

    def forget(self, incarnation: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._ids.pop(incarnation, None)
            self.path(incarnation).unlink(missing_ok=True)

    def forget_all_but(self, incarnations: Iterable[str]) -> None:
        """What an earlier owner of the pool left, also of a replacement that was not finished."""
        kept = {self.path(incarnation) for incarnation in incarnations}
        for path in self._folder.glob(f"*{self._kind.suffix}"):
            if path not in kept:
                self.forget(path.name.removesuffix(self._kind.suffix))
        for path in self._folder.glob(f".*{self._kind.suffix}.new"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _trouble(path: Path, error: OSError) -> MediaError:
    problem = f"the key file {path}: {error.strerror}"
    return MediaError(problem, next_step="check the pool's directory: space, permissions")
