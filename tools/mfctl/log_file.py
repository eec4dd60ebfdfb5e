"""The service's log in a file, which may be moved away at any time: then it goes on in a new one."""

from __future__ import annotations

import io
import logging
import os
import sys
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import ConfigError

# Its group may read it: who looks after logs need not be who runs the service.
MODE: Final = 0o640


class LogFile(WatchedFileHandler):
    """Whatever happens to the file, no call that logs fails: what cannot be written there goes to stderr."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`ConfigError` when it cannot be written."""
        try:
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(
                f"log.file = {path}: cannot be written: {error.strerror}",
                next_step="Make its directory, give the service's user access, or name another file.",
            ) from error

    def _open(self) -> io.TextIOWrapper:
        """A new one has its mode whatever the process' mask is; one that is there keeps its own."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait for a pipe's reader
        try:
            descriptor = os.open(self.baseFilename, flags | os.O_EXCL, MODE)
            os.fchmod(descriptor, MODE)
        except FileExistsError:
            descriptor = os.open(self.baseFilename, flags)
        return io.TextIOWrapper(os.fdopen(descriptor, "ab"), encoding=self.encoding, errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError as error:  # of looking for the file, and of making it anew
            self._say_elsewhere(record, error)

    def handleError(self, record: logging.LogRecord) -> None:
        """Of writing. Called in the handling of an exception."""
        self._say_elsewhere(record, sys.exc_info()[1])

    def _say_elsewhere(self, record: logging.LogRecord, error: BaseException | None) -> None:
        try:
            sys.stderr.write(f"{self.format(record)} (not in {self.baseFilename}: {error})\n")
        except Exception:  # then nobody can be told
            return
