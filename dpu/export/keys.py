"""Secrets of worker incarnations, each in a file that the target reads, gone with its incarnation: of DH-HMAC-CHAP, and
of TLS.

A key that takes the place of another one has a file of its own, ``one.1.key`` after ``one.key``, since SPDK reads the
file of a key whenever a host connects (module/keyring/file/keyring.c, keyring_file_get_key): the former one must be as
it was for as long as the target asks for it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.dpu.export.desired import HostKey
from meshfusion.dpu.export.key_disk import KeyDisk
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.auth_keys import format_secret, key_id, new_secret, parse_secret
from meshfusion.jbof.nvme.tls_psk import new_psk, parse_psk


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

    Whenever this process ends, the newest file of an incarnation is what is desired, and the target is brought to that.
    """

    def __init__(self, folder: Path, kind: KeyKind = CHAP, disk: KeyDisk | None = None) -> None:
        self._folder, self._kind, self._disk = folder, kind, disk or KeyDisk()
        self._name = re.compile(rf"([^.]+)(?:\.([1-9]\d*))?{re.escape(kind.suffix)}")
        self._lock = threading.Lock()  # so that a key is not replaced while it goes
        self._newest: dict[str, HostKey] = {}
        self._single: set[str] = set()  # of which no file but the newest is there

    def path(self, incarnation: str) -> Path:
        """Of the newest; without any, of the first."""
        known = self._newest.get(incarnation)
        return known.file if known is not None else (self._files(incarnation) or [self._file(incarnation, 0)])[-1]

    def make(self, incarnation: str) -> None:
        """A new key, unless there is one, durable when this returns. Raises
        :class:`~meshfusion.jbof.errors.MediaError`."""
        with self._lock:
            if not self._files(incarnation):
                self._write(self._file(incarnation, 0), self._kind.new_text())

    def replace(self, incarnation: str) -> None:
        """Another key in the place of the newest; nothing for one that has none. It is durable when this returns.
        Raises MediaError: then the newest is what it was."""
        with self._lock:
            files = self._files(incarnation)
            if not files:
                return
            path, text = self._file(incarnation, self._number(files[-1]) + 1), self._kind.new_text()
            self._single.discard(incarnation)
            self._write(path, text)
            self._newest[incarnation] = HostKey(path, key_id(text))

    def read(self, incarnation: str, wanted_id: str = "") -> str:
        """The text of its key with that id; of the newest, if that is gone, since a file goes when its target asks for
        the newest. Raises :class:`~meshfusion.jbof.errors.MediaError`, or what a damaged key raises."""
        for path in self._files(incarnation) if wanted_id else ():
            try:
                text = self._read(path)
            except MeshFusionError:
                continue
            if key_id(text) == wanted_id:
                return text
        return self._read(self.path(incarnation))

    def wanted(self, incarnation: str) -> HostKey:
        """What its target shall ask for. Never waits for a key that is being replaced."""
        known = self._newest.get(incarnation)
        if known is not None:
            return known
        path = self.path(incarnation)
        try:
            text = self._read(path)
        except MeshFusionError:  # the step that needs it tells why
            return HostKey(path)
        return self._newest.setdefault(incarnation, HostKey(path, key_id(text)))  # one that came meanwhile goes before

    def age_s(self, incarnation: str, wall_s: float) -> float:
        """Of the newest. ``wall_s``: now, in seconds since 1970. 0 when nobody knows, or it is from the future."""
        made_at_s = self._disk.made_at_s(self.path(incarnation))
        return 0.0 if made_at_s is None else max(0.0, wall_s - made_at_s)

    def is_there(self, incarnation: str, there_id: str) -> None:
        """The target asks for this key, and knows the file of no other one: if it is the newest, those before it go."""
        with self._lock:
            newest = self._newest.get(incarnation)
            if newest is None or newest.id != there_id or incarnation in self._single:
                return
            for path in self._files(incarnation):
                if path != newest.file:
                    self._disk.remove(path)
            with contextlib.suppress(MediaError):  # then it is done again
                self._disk.sync(self._folder)  # or a power failure brings them back
                self._single.add(incarnation)

    def forget(self, incarnation: str) -> None:
        with self._lock:
            self._newest.pop(incarnation, None)
            self._single.discard(incarnation)
            for path in self._files(incarnation):
                self._disk.remove(path)

    def forget_all_but(self, incarnations: Iterable[str]) -> None:
        """What an earlier owner of the pool left, also of a key that was not finished. Those that stay are durable when
        this returns: it may have ended before its last one was. Raises MediaError."""
        kept = frozenset(incarnations)
        for name in self._disk.names(self._folder):
            whole = name.removeprefix(".").removesuffix(".new")
            found = self._name.fullmatch(whole)
            if found is not None and (whole != name or found[1] not in kept):
                self._disk.remove(self._folder / name)
        self._disk.sync(self._folder)

    def _write(self, path: Path, text: str) -> None:
        try:
            self._disk.write(path, text)
        except MediaError:
            self._disk.remove(path)  # it may have been done
            raise

    def _read(self, path: Path) -> str:
        text = self._disk.read(path).strip()
        self._kind.check(text)
        return text

    def _files(self, incarnation: str) -> list[Path]:
        """The newest is the last."""
        found = (self._name.fullmatch(name) for name in self._disk.names(self._folder))
        numbers = [int(one[2] or 0) for one in found if one is not None and one[1] == incarnation]
        return [self._file(incarnation, number) for number in sorted(numbers)]

    def _file(self, incarnation: str, number: int) -> Path:
        return self._folder / f"{incarnation}{f'.{number}' if number else ''}{self._kind.suffix}"

    def _number(self, path: Path) -> int:
        found = self._name.fullmatch(path.name)
        assert found is not None
        return int(found[2] or 0)
