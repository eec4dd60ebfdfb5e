"""The status codes that a host of NVMe/RDMA can meet, as the specification names them, and what to do about them."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class Retry(enum.Enum):
    """Can the same command succeed when it is sent again? The Do Not Retry bit of a status overrules this."""

    NO = "no"
    SAME_PATH = "same_path"  # after a pause
    OTHER_PATH = "other_path"  # there, or here once this path is back


class Figure(enum.Enum):
    """Which figure of Base a code is from. Codes 80h and up of type 1h mean different things by command."""

    GENERIC = "Base Figure 102"
    COMMAND = "Base Figure 103"
    IO_COMMAND = "Base Figure 104"
    FABRICS = "Base Figure 105"
    MEDIA = "Base Figure 106"
    PATH = "Base Figure 107"


SCT_OF: Final = {
    Figure.GENERIC: 0,
    Figure.COMMAND: 1,
    Figure.IO_COMMAND: 1,
    Figure.FABRICS: 1,
    Figure.MEDIA: 2,
    Figure.PATH: 3,
}


class StatusCode(NamedTuple):
    """``name`` is the specification's; ``meaning`` and ``next_step`` are for the reader of an error."""

    figure: Figure
    sc: int
    name: str
    meaning: str
    retry: Retry
    next_step: str


_BUG: Final = "Report this as a bug of MeshFusion, with the target's name and version."
_TARGET: Final = "Look at the target's log for the cause."
_DRIVE: Final = "Look at the health of the drive behind this namespace; replace it if this repeats."
_WAIT: Final = "Nothing, if it passes; look at the target's log if it lasts."
_RECONNECT: Final = "Nothing, if it reconnects; otherwise check that the target runs and can be reached."
_PATH: Final = "Nothing, while another path works; otherwise look at the target's access state for this namespace."
_FENCED: Final = "Another host took this namespace over: attach again under a new name, after finding out why."
_ALLOW: Final = "Allow this host's NQN on the subsystem at the target; a fenced host must attach under a new name."
_NAMES: Final = "Check subsystem NQN, host NQN and host identifier against the target's configuration."
_WRITABLE: Final = "Make the namespace writable at the target."

_G, _C, _I, _F, _M, _P = Figure
_NO, _SAME, _OTHER = Retry

STATUS_CODES: Final = (
    StatusCode(_G, 0x00, "Successful Completion", "it worked", _NO, "Nothing."),
    StatusCode(_G, 0x01, "Invalid Command Opcode", "the target does not know this command", _NO, _BUG),
    StatusCode(_G, 0x02, "Invalid Field in Command", "the target does not take a value in the command", _NO, _BUG),
    StatusCode(_G, 0x03, "Command ID Conflict", "the command identifier is in use", _NO, _BUG),
    StatusCode(_G, 0x04, "Data Transfer Error", "moving the data over the fabric failed", _SAME, _TARGET),
    StatusCode(
        _G, 0x05, "Commands Aborted due to Power Loss Notification", "the target loses power", _OTHER, _RECONNECT
    ),
    StatusCode(_G, 0x06, "Internal Error", "the target failed by itself", _SAME, _TARGET),
    StatusCode(_G, 0x07, "Command Abort Requested", "the host asked for its end", _SAME, _WAIT),
    StatusCode(_G, 0x08, "Command Aborted due to SQ Deletion", "its queue was taken down", _OTHER, _RECONNECT),
    StatusCode(_G, 0x0B, "Invalid Namespace or Format", "the namespace is not there", _NO, _NAMES),
    StatusCode(_G, 0x0C, "Command Sequence Error", "the command came at the wrong time", _NO, _BUG),
    StatusCode(_G, 0x0D, "Invalid SGL Segment Descriptor", "the descriptor list is not acceptable", _NO, _BUG),
    StatusCode(_G, 0x0E, "Invalid Number of SGL Descriptors", "the descriptor list is not acceptable", _NO, _BUG),
    StatusCode(
        _G, 0x0F, "Data SGL Length Invalid", "the described memory is too short, or over the target's limit", _NO, _BUG
    ),
    StatusCode(_G, 0x10, "Metadata SGL Length Invalid", "metadata was not described well", _NO, _BUG),
    StatusCode(_G, 0x11, "SGL Descriptor Type Invalid", "the target does not take this kind of descriptor", _NO, _BUG),
    StatusCode(_G, 0x14, "Atomic Write Unit Exceeded", "the write is longer than can be atomic", _NO, _BUG),
    StatusCode(_G, 0x15, "Operation Denied", "access rights are missing", _NO, "Check the target's security settings."),
    StatusCode(_G, 0x16, "SGL Offset Invalid", "data or list are at the wrong place of the capsule", _NO, _BUG),
    StatusCode(_G, 0x18, "Host Identifier Inconsistent Format", "host identifiers differ in length", _NO, _NAMES),
    StatusCode(_G, 0x19, "Keep Alive Timer Expired", "the target gave this host up", _OTHER, _RECONNECT),
    StatusCode(
        _G, 0x1A, "Keep Alive Timeout Invalid", "the timeout is none for it", _NO, "Choose another keep-alive timeout."
    ),
    StatusCode(_G, 0x1B, "Command Aborted due to Preempt and Abort", "a reservation was taken away", _NO, _FENCED),
    StatusCode(_G, 0x1C, "Sanitize Failed", "the drive waits for a sanitize to be repeated", _NO, _DRIVE),
    StatusCode(_G, 0x1D, "Sanitize In Progress", "the drive is being sanitized", _SAME, _WAIT),
    StatusCode(_G, 0x1E, "SGL Data Block Granularity Invalid", "memory must be aligned to 4 bytes", _NO, _BUG),
    StatusCode(_G, 0x20, "Namespace is Write Protected", "writes are off", _NO, _WRITABLE),
    StatusCode(_G, 0x21, "Command Interrupted", "the target asks for it again", _SAME, _WAIT),
    StatusCode(_G, 0x22, "Transient Transport Error", "the transport failed for a moment", _SAME, _WAIT),
    StatusCode(_G, 0x23, "Command Prohibited by Command and Feature Lockdown", "it is locked", _NO, "Unlock it there."),
    StatusCode(_G, 0x24, "Admin Command Media Not Ready", "the drive is starting", _SAME, _WAIT),
    StatusCode(_G, 0x27, "Host Identifier Not Initialized", "the host has no identifier there", _NO, _BUG),
    StatusCode(_G, 0x80, "LBA Out of Range", "the namespace ends before these blocks", _NO, _NAMES),
    StatusCode(
        _G, 0x81, "Capacity Exceeded", "the namespace is thinly provisioned and full", _NO, "Give it more space there."
    ),
    StatusCode(_G, 0x82, "Namespace Not Ready", "the namespace cannot be used now", _SAME, _WAIT),
    StatusCode(_G, 0x83, "Reservation Conflict", "another host holds a reservation", _NO, _FENCED),
    StatusCode(_G, 0x84, "Format In Progress", "the namespace is being formatted", _SAME, _WAIT),
    StatusCode(_C, 0x01, "Invalid Queue Identifier", "a queue with this identifier exists", _NO, _BUG),
    StatusCode(
        _C, 0x02, "Invalid Queue Size", "the target does not take this depth", _NO, "Choose another queue depth."
    ),
    StatusCode(_C, 0x03, "Abort Command Limit Exceeded", "too many aborts at a time", _SAME, _WAIT),
    StatusCode(_C, 0x05, "Asynchronous Event Request Limit Exceeded", "too many requests at a time", _NO, _BUG),
    StatusCode(_C, 0x09, "Invalid Log Page", "the target does not keep this log", _NO, _BUG),
    StatusCode(_C, 0x0A, "Invalid Format", "the format is not supported", _NO, _BUG),
    StatusCode(_C, 0x0D, "Feature Identifier Not Saveable", "the feature cannot be saved", _NO, _BUG),
    StatusCode(_C, 0x0E, "Feature Not Changeable", "the feature cannot be changed", _NO, _BUG),
    StatusCode(_C, 0x0F, "Feature Not Namespace Specific", "the feature is not one of a namespace", _NO, _BUG),
    StatusCode(_C, 0x2C, "Invalid I/O Command Set", "the target does not know this command set", _NO, _BUG),
    StatusCode(_I, 0x80, "Conflicting Attributes", "attributes exclude each other", _NO, _BUG),
    StatusCode(_I, 0x81, "Invalid Protection Information", "the namespace has protection information", _NO, _BUG),
    StatusCode(_I, 0x82, "Attempted Write to Read Only Range", "these blocks are read-only", _NO, _WRITABLE),
    StatusCode(_I, 0x83, "Command Size Limit Exceeded", "there are too many or too long ranges", _NO, _BUG),
    StatusCode(_F, 0x80, "Incompatible Format", "the target does not know this record format", _NO, _BUG),
    StatusCode(_F, 0x81, "Controller Busy", "the controller is taken, or all are", _SAME, _WAIT),
    StatusCode(_F, 0x82, "Connect Invalid Parameters", "the target does not know these names or ids", _NO, _NAMES),
    StatusCode(_F, 0x83, "Connect Restart Discovery", "the subsystem is not available here", _OTHER, _RECONNECT),
    StatusCode(_F, 0x84, "Connect Invalid Host", "this host may not use the subsystem", _NO, _ALLOW),
    StatusCode(_F, 0x85, "Invalid Queue Type", "the command is for another kind of queue", _NO, _BUG),
    StatusCode(_F, 0x90, "Discover Restart", "the log changed while it was read", _SAME, _WAIT),
    StatusCode(
        _F, 0x91, "Authentication Required", "the host must authenticate first", _NO, "Configure a key for this host."
    ),
    StatusCode(_M, 0x80, "Write Fault", "the medium did not take the data", _SAME, _DRIVE),
    StatusCode(_M, 0x81, "Unrecovered Read Error", "the medium lost the data", _SAME, _DRIVE),
    StatusCode(_M, 0x82, "End-to-end Guard Check Error", "the data was changed on its way", _NO, _DRIVE),
    StatusCode(_M, 0x83, "End-to-end Application Tag Check Error", "the data is of another owner", _NO, _DRIVE),
    StatusCode(_M, 0x84, "End-to-end Reference Tag Check Error", "the data is of other blocks", _NO, _DRIVE),
    StatusCode(_M, 0x85, "Compare Failure", "the data differs", _NO, _BUG),
    StatusCode(_M, 0x86, "Access Denied", "access rights are missing", _NO, "Check the target's security settings."),
    StatusCode(_M, 0x87, "Deallocated or Unwritten Logical Block", "nothing was written there", _NO, _BUG),
    StatusCode(_M, 0x88, "End-to-End Storage Tag Check Error", "the data has a wrong storage tag", _NO, _DRIVE),
    StatusCode(_P, 0x00, "Internal Path Error", "this controller failed, not the namespace", _OTHER, _PATH),
    StatusCode(_P, 0x01, "Asymmetric Access Persistent Loss", "this controller lost it for good", _OTHER, _PATH),
    StatusCode(_P, 0x02, "Asymmetric Access Inaccessible", "this controller cannot reach it", _OTHER, _PATH),
    StatusCode(_P, 0x03, "Asymmetric Access Transition", "its access state is changing", _OTHER, _PATH),
    StatusCode(_P, 0x60, "Controller Pathing Error", "the controller found its path broken", _OTHER, _PATH),
    StatusCode(_P, 0x70, "Host Pathing Error", "the host found its path broken", _OTHER, _RECONNECT),
    StatusCode(_P, 0x71, "Command Aborted By Host", "the host ended the connection", _OTHER, _RECONNECT),
)
