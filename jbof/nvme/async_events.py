"""What the completion of an Asynchronous Event Request tells (Base Figures 148 to 155).

Dword 0 holds the type in bits 2:0, the information in bits 15:8 and the log page in bits 23:16.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.fields import MAX_U32, check_int


class EventType(enum.IntEnum):
    """Base Figure 148; 5 is reserved."""

    ERROR = 0
    HEALTH = 1
    NOTICE = 2
    IMMEDIATE = 3
    ONE_SHOT = 4
    RESERVED = 5
    COMMAND_SET = 6
    VENDOR = 7


class EventKind(enum.Enum):
    """The events that a host acts upon or reports: (type, information)."""

    PERSISTENT_INTERNAL_ERROR = (EventType.ERROR, 0x03)
    TRANSIENT_INTERNAL_ERROR = (EventType.ERROR, 0x04)
    SUBSYSTEM_RELIABILITY = (EventType.HEALTH, 0x00)
    TEMPERATURE_THRESHOLD = (EventType.HEALTH, 0x01)
    SPARE_BELOW_THRESHOLD = (EventType.HEALTH, 0x02)
    NAMESPACE_ATTRIBUTE_CHANGED = (EventType.NOTICE, 0x00)
    FIRMWARE_ACTIVATION_STARTING = (EventType.NOTICE, 0x01)
    ANA_CHANGED = (EventType.NOTICE, 0x03)
    RESERVATION_LOG_AVAILABLE = (EventType.COMMAND_SET, 0x00)
    SANITIZE_COMPLETED = (EventType.COMMAND_SET, 0x01)


_KIND_OF: Final = {kind.value: kind for kind in EventKind}


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """``log_page`` is the one to read; until it is read, no event of this type comes again (Base 5.1.2)."""

    type: EventType
    info: int
    log_page: int

    @property
    def kind(self) -> EventKind | None:
        """None: an event that we do not know. Reading its log page is all that can be done."""
        return _KIND_OF.get((self.type, self.info))


def async_event(result: int) -> AsyncEvent:
    """From dword 0 of the completion."""
    check_int("event result", result, 0, MAX_U32)
    return AsyncEvent(EventType(result & 0x7), result >> 8 & 0xFF, result >> 16 & 0xFF)
