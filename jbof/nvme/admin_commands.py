"""Commands for the admin queue: Identify, Get Log Page, Features, Keep Alive, Asynchronous Event Request, Abort.

Their data lies in host memory described by one keyed descriptor (RDMA Figure 9). All builders raise
:class:`~meshfusion.jbof.nvme.fields.NvmeFieldError` for values out of range.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.command import MAX_COMMAND_ID, AdminOpcode, Command, common_command
from meshfusion.jbof.nvme.fields import (
    BROADCAST_NSID,
    MAX_U16,
    MAX_U32,
    MAX_U64,
    check_int,
    check_nsid,
    field_error,
)
from meshfusion.jbof.nvme.sgl import DataPlace, DataPointer

IDENTIFY_BYTES: Final = 4096
MAX_QUEUE_COUNT: Final = 65535  # FFFFh is no valid 0's based count (Base Figure 444)

_NVM_COMMAND_SET: Final = 0x00  # command set identifier (Base Figure 312)


class Cns(enum.IntEnum):
    """What Identify returns (Base Figure 311)."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NAMESPACE_LIST = 0x02
    NAMESPACE_DESCRIPTORS = 0x03
    COMMAND_SET_CONTROLLER = 0x06


class LogPage(enum.IntEnum):
    """Base Figure 203."""

    ERROR_INFORMATION = 0x01
    CHANGED_NAMESPACES = 0x04
    ASYMMETRIC_NAMESPACE_ACCESS = 0x0C


class Feature(enum.IntEnum):
    """Base Figure 386."""

    NUMBER_OF_QUEUES = 0x07
    ASYNC_EVENT_CONFIGURATION = 0x0B
    KEEP_ALIVE_TIMER = 0x0F


class FeatureSelect(enum.IntEnum):
    """Which value Get Features returns (Base Figure 193)."""

    CURRENT = 0
    DEFAULT = 1
    SAVED = 2
    CAPABILITIES = 3


class AsyncEvents(enum.IntFlag):
    """Notices to switch on with the Asynchronous Event Configuration feature (Base Figure 392).

    The OAES field of the Identify Controller data has the same bits for those that a controller supports.
    """

    NAMESPACE_ATTRIBUTE = 1 << 8
    FIRMWARE_ACTIVATION = 1 << 9
    ASYMMETRIC_NAMESPACE_ACCESS = 1 << 11


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """I/O queues granted by a controller: at most what was asked for, or more (Base Figure 445)."""

    submission: int
    completion: int

    @property
    def pairs(self) -> int:
        """Queue pairs that may be connected; over Fabrics a connection makes one of each."""
        return min(self.submission, self.completion)


def identify(cns: Cns, data: DataPointer, *, nsid: int = 0) -> Command:
    """Any Identify command (Base Figures 308 and 309) for the NVM command set; ``data`` takes 4096 bytes."""
    _check_data("Identify data", data, IDENTIFY_BYTES)
    return common_command(
        AdminOpcode.IDENTIFY,
        nsid=check_int("NSID", nsid, 0, MAX_U32),
        data=data,
        cdw10=cns,
        cdw11=_NVM_COMMAND_SET << 24,
    )


def identify_namespace(nsid: int, data: DataPointer) -> Command:
    return identify(Cns.NAMESPACE, data, nsid=check_nsid(nsid))


def identify_controller(data: DataPointer) -> Command:
    return identify(Cns.CONTROLLER, data)


def identify_active_namespaces(data: DataPointer, *, after_nsid: int = 0) -> Command:
    """The first 1024 active namespaces with an identifier greater than ``after_nsid``.

    FFFFFFFEh and FFFFFFFFh are no valid starts (Base 5.1.13.2.2).
    """
    return identify(Cns.ACTIVE_NAMESPACE_LIST, data, nsid=check_int("NSID", after_nsid, 0, MAX_U32 - 2))


def identify_namespace_descriptors(nsid: int, data: DataPointer) -> Command:
    return identify(Cns.NAMESPACE_DESCRIPTORS, data, nsid=check_nsid(nsid))


def identify_nvm_limits(data: DataPointer) -> Command:
    """The limits of Dataset Management and Write Zeroes (NVM Figure 120); optional for a controller."""
    return identify(Cns.COMMAND_SET_CONTROLLER, data)


def get_log_page(
    page: LogPage,
    data: DataPointer,
    *,
    offset_bytes: int = 0,
    retain_event: bool = False,
    specific: int = 0,
    nsid: int = BROADCAST_NSID,
) -> Command:
    """As many bytes as ``data`` describes, from ``offset_bytes`` on (Base Figures 198 to 201).

    Reading a page clears the event that announced it, unless ``retain_event``: so read all parts but the last with
    it. ``specific`` is the Log Specific Parameter, 7 bits; for the ANA page 1 leaves the namespace lists out.
    """
    _check_data("log page data", data)
    if data.length_bytes % 4:
        raise field_error("NUMD", f"cannot express {data.length_bytes} bytes: they are no whole dwords")
    if check_int("LPO", offset_bytes, 0, MAX_U64) % 4:
        raise field_error("LPO", f"is {offset_bytes}; it must be a multiple of 4")
    dwords = data.length_bytes // 4 - 1  # 0's based
    lsp = check_int("LSP", specific, 0, 0x7F)
    return common_command(
        AdminOpcode.GET_LOG_PAGE,
        nsid=check_int("NSID", nsid, 0, MAX_U32),
        data=data,
        cdw10=(dwords & MAX_U16) << 16 | retain_event << 15 | lsp << 8 | page,
        cdw11=dwords >> 16,
        cdw12=offset_bytes & MAX_U32,
        cdw13=offset_bytes >> 32,
    )


def get_feature(feature: Feature, *, select: FeatureSelect = FeatureSelect.CURRENT) -> Command:
    """Of a feature without data: its value is dword 0 of the completion (Base Figure 193)."""
    return common_command(AdminOpcode.GET_FEATURES, cdw10=select << 8 | feature)


def set_feature(feature: Feature, value: int) -> Command:
    """A feature without data, for this controller until its reset (Base Figure 384, not saved)."""
    return common_command(AdminOpcode.SET_FEATURES, cdw10=feature, cdw11=check_int("feature value", value, 0, MAX_U32))


def set_queue_count(pairs: int) -> Command:
    """Ask for ``pairs`` I/O queue pairs, before the first of them is connected (Base Figure 444).

    The completion tells how many are granted: :func:`queue_counts`.
    """
    zeroes_based = check_int("number of queues", pairs, 1, MAX_QUEUE_COUNT) - 1
    return set_feature(Feature.NUMBER_OF_QUEUES, zeroes_based << 16 | zeroes_based)


def queue_counts(result: int) -> QueueCounts:
    """From dword 0 of the completion of Set or Get Features, Number of Queues (Base Figure 445)."""
    return QueueCounts(submission=(result & MAX_U16) + 1, completion=(result >> 16 & MAX_U16) + 1)


def set_keep_alive_timeout(timeout_ms: int) -> Command:
    """Change the timeout given with Connect (Base Figure 398); RDMA does not allow 0, which means none (RDMA 3.4)."""
    return set_feature(Feature.KEEP_ALIVE_TIMER, check_int("KATO", timeout_ms, 1, MAX_U32))


def set_async_events(events: AsyncEvents) -> Command:
    """Switch on exactly these notices; critical warnings of the health log stay off."""
    return set_feature(Feature.ASYNC_EVENT_CONFIGURATION, events)


def keep_alive() -> Command:
    return common_command(AdminOpcode.KEEP_ALIVE)


def async_event_request() -> Command:
    """Completes when an event happens: :func:`meshfusion.jbof.nvme.async_events.async_event` reads it.

    A controller takes as many at a time as its AERL field + 1 says.
    """
    return common_command(AdminOpcode.ASYNCHRONOUS_EVENT_REQUEST)


def abort(queue_id: int, command_id: int) -> Command:
    """Ask for the end of one outstanding command (Base Figure 144). It may complete nevertheless: see :func:`aborted`.

    A controller takes as many at a time as its ACL field + 1 says.
    """
    sqid = check_int("SQID", queue_id, 0, MAX_U16)
    return common_command(AdminOpcode.ABORT, cdw10=check_int("CID", command_id, 0, MAX_COMMAND_ID) << 16 | sqid)


def aborted(result: int) -> bool:
    """Was the command aborted? From dword 0 of the completion of Abort (Base Figure 145)."""
    return not result & 1


def _check_data(field: str, data: DataPointer, length_bytes: int | None = None) -> None:
    if data.place is not DataPlace.REMOTE:
        raise field_error(field, f"must be one piece of registered memory, not {data.place.value}")
    if length_bytes is not None and data.length_bytes != length_bytes:
        raise field_error(field, f"has room for {data.length_bytes} bytes; it must be {length_bytes}")
