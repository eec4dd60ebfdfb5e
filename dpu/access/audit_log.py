"""The audit log: a file of JSON lines, one before and one after each call of administration.

Two, so that nothing is ever done that the log does not tell of: the first is durable before the call begins, and a
process that dies in the middle leaves it as the last word. ``call`` joins them. A call that is refused for its caller's
role is one line, and of each caller no more than :data:`REFUSALS_PER_MINUTE` in any minute: who has no rights cannot
fill the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from meshfusion.dpu.api.security.guard import Caller
from meshfusion.dpu.api.security.patient_work import PatientWork
from meshfusion.dpu.line_limit import LineLimit
from meshfusion.jbof.errors import MediaError

log = logging.getLogger("meshfusion.security")

BEGUN: Final = "begun"
NOT_MADE: Final = "not made"
"""Of a call whose first record the disk took so late that the call had been refused for that."""
FILE_NAME: Final = "audit.log"  # in the pool's directory, when nothing else is configured
DEADLINE_S: Final = 2.0
"""A disk that has not answered for so long gets no more calls: each would keep a thread that lookups need (rule 8)."""
REFUSALS_PER_MINUTE: Final = 6
_MAX_REFUSED: Final = 1024  # callers whose refusals are counted; those of the configuration, so that few have as many
_MAX_VALUE_CHARS: Final = 1_000
_SECRETS: Final = frozenset({"handoff_token", "host_key", "token", "key"})


class AuditLog:
    """Safe for use by several threads, and with tools that move the file away: the next record begins a new one.

    ``wall_s``: seconds since the epoch; ``clock``: monotonic seconds, for the limit of refusals. Opening it never
    fails; records do, with MediaError, until the trouble is over. No call waits longer than :data:`DEADLINE_S`.
    """

    def __init__(
        self,
        path: Path,
        *,
        wall_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._wall_s, self._clock = wall_s, clock
        self._disk = PatientWork("meshfusion-audit")
        self._descriptor: int | None = None  # of the work's, which goes on one at a time
        self._is_failing = False
        self._lock = threading.Lock()  # of the limits
        self._limits: OrderedDict[str, LineLimit] = OrderedDict()  # by principal, the one last refused at the end

    def begin(self, caller: Caller, request: Message | None) -> str:
        """Durable before it returns. Raises :class:`~meshfusion.jbof.errors.MediaError`: do not make the call. When the
        disk takes the record after that all the same, :data:`NOT_MADE` follows it."""
        entry = uuid.uuid4().hex
        arguments = {} if request is None else arguments_of(request)
        record = self._record(entry, caller, BEGUN, arguments=arguments)
        self._write(record, "nothing was done", when_late=lambda: self._put(self._record(entry, caller, NOT_MADE)))
        return entry

    def end(self, entry: str, caller: Caller, outcome: str, duration_s: float) -> None:
        """``outcome``: "ok", or the error's class name. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        record = self._record(entry, caller, outcome, duration_ms=round(duration_s * 1000, 3))
        self._write(record, f"{caller.name} was made before, and ended with: {outcome}")

    def refuse(self, caller: Caller, outcome: str) -> None:
        """Of a call that is not made since its caller may not: a line, with how many before it were not recorded.
        Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        principal = str(caller.principal)
        with self._lock:
            limit = self._limits.pop(principal, None) or LineLimit(REFUSALS_PER_MINUTE)
            self._limits[principal] = limit
            if len(self._limits) > _MAX_REFUSED:
                self._limits.popitem(last=False)
            passed_over = limit.take(self._clock())
        if passed_over is not None:
            more = {"not_recorded": passed_over} if passed_over else {}
            self._write(self._record(uuid.uuid4().hex, caller, outcome, **more), "the call is refused")

    def probe(self) -> None:
        """Make the file now rather than at the first record, so that trouble is told at the start, in the log."""
        try:
            self._disk.do(self._open, within_s=DEADLINE_S)
        except OSError as error:
            self._tell(error)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # else the process' end closes it
            self._disk.do(self._drop, within_s=DEADLINE_S)

    def _record(self, entry: str, caller: Caller, outcome: str, **more: Any) -> dict[str, Any]:
        now_s = self._wall_s()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
        return {
            "time": f"{at}.{int(now_s % 1 * 1000):03d}Z",
            "call": entry,
            "principal": str(caller.principal),
            "peer": caller.peer,
            "rpc": caller.name,
            "outcome": outcome,
            **more,
        }

    def _write(self, record: dict[str, Any], done: str, *, when_late: Callable[[], None] | None = None) -> None:
        try:
            self._disk.do(lambda: self._put(record), within_s=DEADLINE_S, when_late=when_late)
        except OSError as error:
            self._tell(error)
            raise MediaError(
                f"the audit log {self.path} cannot be written ({error.strerror}); {done}",
                next_step="Make room and writable what the service's audit.path names; lookups go on meanwhile.",
            ) from error

    def _put(self, record: dict[str, Any]) -> None:
        try:
            _append(self._open(), json.dumps(record).encode() + b"\n")
        except OSError:
            self._drop()  # so that the next one looks at it anew
            raise
        if self._is_failing:
            log.warning("the audit log %s is written again", self.path)
            self._is_failing = False

    def _tell(self, error: OSError) -> None:
        if not self._is_failing:
            log.error("the audit log %s cannot be written (%s): administration is refused", self.path, error.strerror)
        self._is_failing = True

    def _open(self) -> int:
        if self._descriptor is not None and _is_at(self.path, self._descriptor):
            return self._descriptor
        self._drop()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(0, "it is not a regular file")
            if found.st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
            _sync_name(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return descriptor

    def _drop(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def arguments_of(request: Message) -> dict[str, Any]:
    """What was asked for: all fields, since a drive's number may be 0; texts cut to a bound, secrets only as that."""
    return {
        field.name: "(secret)" if field.name in _SECRETS else _shown(getattr(request, field.name))
        for field in request.DESCRIPTOR.fields
    }


def _shown(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _append(descriptor: int, line: bytes) -> None:
    """All of it, on a line of its own, and durably: or the file is as long as it was, as far as it lets itself."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
        line = b"\n" + line  # half a line, of a process that died
    try:
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size_bytes)
        raise


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def _sync_name(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
