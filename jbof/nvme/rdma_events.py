"""Connection manager events without waiting for them.

pyverbs keeps Python's global lock while it waits for an event, and does not show the file descriptor to wait on: so
the descriptor is found among those of the process when the channel is opened, made non-blocking, and polled.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.verbs_names import Verbs

_DESCRIPTORS: Final = Path("/proc/self/fd")
_DEVICE: Final = "rdma_cm"
_ATTEMPTS: Final = 16
_ABSENT: Final = (errno.ENODEV, errno.ENOENT, errno.ENOSYS)
_opening = threading.Lock()


class CmEvent(NamedTuple):
    """``kind``: one of pyverbs' RDMA_CM_EVENT constants; ``words``: the same for people."""

    kind: int
    words: str
    private_data: bytes


class EventChannel:
    """``channel``: pyverbs' object, for CMIDs. ``fd`` is readable when there is an event."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs
        self.channel, self.fd = _opened(verbs)
        os.set_blocking(self.fd, False)

    def next_event(self) -> CmEvent | None:
        """None: there is none now."""
        try:
            event = self._verbs.CMEvent(self.channel)
        except self._verbs.PyverbsError as error:
            if getattr(error, "error_code", None) in (errno.EAGAIN, errno.EINTR):
                return None
            raise
        taken = CmEvent(int(event.event_type), event.event_str(), event.private_data)
        event.ack_cm_event()
        return taken

    def wait_for(self, kind: int, deadline_s: float) -> None:
        """For set-up outside of an engine's thread. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        event = self.next_event()
        while event is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
            event = self.next_event()
        if event is None or event.kind != kind:
            words = "nothing" if event is None else event.words
            raise MediaError(
                f"the RDMA connection manager answered with {words}",
                next_step="Check the target's address, and that an RDMA device is on the way to it (rdma link).",
            )

    def close(self) -> None:
        self.channel.close()


def _opened(verbs: Verbs) -> tuple[Any, int]:
    """A new channel and its descriptor: the one that is new. Tried again if others opened or closed some meanwhile."""
    with _opening:
        for _ in range(_ATTEMPTS):
            before = _descriptors()
            try:
                channel = verbs.CMEventChannel()
            except verbs.PyverbsError as error:
                kind = UnsupportedError if getattr(error, "error_code", None) in _ABSENT else MediaError
                raise kind(
                    f"the RDMA connection manager cannot be used: {error}",
                    next_step="Load its kernel module (modprobe rdma_ucm) and check that there is an RDMA device.",
                ) from error
            new = _descriptors() - before
            if len(new) == 1:
                return channel, new.pop()
            channel.close()
    raise UnsupportedError(
        f"the descriptor of an RDMA event channel cannot be found in {_DESCRIPTORS}",
        next_step="Make /proc available to the process.",
    )


def _descriptors() -> set[int]:
    """Those of this process that are event channels of the connection manager."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with suppress(FileNotFoundError):
            if os.readlink(_DESCRIPTORS / name).endswith(f"/{_DEVICE}"):
                found.add(int(name))
    return found
