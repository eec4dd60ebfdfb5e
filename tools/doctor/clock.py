"""Is the clock held by another one? Certificates, leases of etcd and the order of events between services need it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from meshfusion.tools.mfctl.findings import Finding, State

STA_UNSYNC: Final = 0x0040
"""adjtimex(2): nothing disciplines the clock."""
_MAX_ERROR_US: Final = 100_000
_TIMEX_BYTES: Final = 208
_MAXERROR_AT, _STATUS_AT = 24, 40  # of struct timex, where a long has 8 bytes


@dataclass(frozen=True, slots=True)
class ClockState:
    """``max_error_us``: by how much it is wrong at most, as the kernel estimates it."""

    status: int
    max_error_us: int


def read_clock() -> ClockState | None:
    """None where the kernel does not tell. Changes nothing: ``modes`` is 0."""
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    timex = (ctypes.c_char * _TIMEX_BYTES)()
    try:
        failed = ctypes.CDLL(None).adjtimex(timex) < 0
    except (OSError, AttributeError):
        return None
    if failed:
        return None
    raw = bytes(timex)
    return ClockState(
        int.from_bytes(raw[_STATUS_AT : _STATUS_AT + 4], "little"),
        int.from_bytes(raw[_MAXERROR_AT : _MAXERROR_AT + 8], "little"),
    )


def check_clock(read: Callable[[], ClockState | None] = read_clock) -> Iterator[Finding]:
    remedy = "systemctl enable --now chrony (or systemd-timesyncd); chronyc tracking shows how it stands."
    state = read()
    if state is None:
        yield Finding("clock", State.UNSEEN, "the kernel does not tell whether it is synchronised", "timedatectl")
    elif state.status & STA_UNSYNC:
        cause = "not synchronised, says the kernel (a virtual machine's may be held by its host all the same)"
        yield Finding("clock", State.WARN, cause, remedy)
    elif state.max_error_us > _MAX_ERROR_US:
        yield Finding(
            "clock", State.WARN, f"synchronised, but may be wrong by {state.max_error_us / 1e3:.0f} ms", remedy
        )
    else:
        yield Finding("clock", State.OK, f"synchronised, wrong by {state.max_error_us / 1e3:.1f} ms at most")
