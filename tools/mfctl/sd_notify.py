"""What systemd is told of the service over the socket that it names in ``NOTIFY_SOCKET``, see sd_notify(3).

Without that variable nobody listens, and nothing is told.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

log = logging.getLogger("meshfusion.service")

# Room for a few messages is always there; a manager that reads none must not hold up the service.
_SEND_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Notifier:
    """``address``: of the manager's datagram socket, "" for none. ``watchdog_s``: unless told that often that all is
    well, it kills the process; None: it does not watch."""

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> Notifier:
        """``pid``: of this process, since a watchdog may be another's (``WATCHDOG_PID``)."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address:
            return cls()
        if address[0] not in "/@":
            log.warning("NOTIFY_SOCKET=%s is no unix socket: systemd is told nothing", address)
            return cls()
        return cls(address, _watchdog_s(environment, pid))

    def tell(self, *assignments: str) -> None:
        """Such as ``READY=1``, in one message. That it does not arrive is logged and nothing more."""
        if not self.address:
            return
        name = self.address if self.address[0] == "/" else "\0" + self.address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.settimeout(_SEND_TIMEOUT_S)
                manager.sendto("\n".join(assignments).encode(), name)
        except OSError as error:
            log.warning("systemd cannot be told %s: %s", " ".join(assignments), error)


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    text, whose = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not text or (whose and whose != str(pid)):
        return None
    if not text.isdecimal() or int(text) == 0:
        log.warning("WATCHDOG_USEC=%s is no count of microseconds: the watchdog is not served", text)
        return None
    return int(text) / 1e6
