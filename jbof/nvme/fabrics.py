"""Names of hosts and subsystems, and the Fabrics commands (Base 4.7, chapter 6). ::

    Connect data (Base Figure 547)
    offset  size  field
         0    16  HOSTID
        16     2  CNTLID
        18   238  zero
       256   256  SUBNQN, UTF-8, then zero
       512   256  HOSTNQN, UTF-8, then zero
       768   256  zero

Builders raise :class:`~meshfusion.jbof.nvme.fields.NvmeFieldError` for values out of range.
"""

from __future__ import annotations

import re
import struct
import uuid
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.command import Command, FabricsType, fabrics_command
from meshfusion.jbof.nvme.fields import MAX_U16, MAX_U32, MAX_U64, check_int, field_error
from meshfusion.jbof.nvme.rdma_cm import MAX_QUEUE_DEPTH, MAX_QUEUE_ID, MIN_QUEUE_DEPTH
from meshfusion.jbof.nvme.sgl import DataPlace, DataPointer

CONNECT_DATA_BYTES: Final = 1024
MAX_NQN_BYTES: Final = 223
ANY_CONTROLLER: Final = 0xFFFF  # the dynamic controller model: the subsystem chooses (Base Figure 547)
DISCOVERY_NQN: Final = "nqn.2014-08.org.nvmexpress.discovery"
UUID_NQN_PREFIX: Final = "nqn.2014-08.org.nvmexpress:uuid:"

_MAX_CONTROLLER_ID: Final = 0xFFEF  # FFF0h and up are reserved (Base Figure 27)
_DISABLE_SQ_FLOW_CONTROL: Final = 1 << 2
_SQ_FLOW_CONTROL_IS_OFF: Final = 0xFFFF
_DATA: Final = struct.Struct("<16sH238x256s256s256x")
_CONNECT: Final = struct.Struct("<HHHBxI")
_PROPERTY: Final = struct.Struct("<B3xIQ")
_SECURITY: Final = struct.Struct("<xBBBI")
_NVME_PROTOCOL: Final = 0xE9  # SECP
_DHCHAP_SPECIFIC: Final = (0x01, 0x01)  # SPSP0, SPSP1
assert _DATA.size == CONNECT_DATA_BYTES

_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DOMAIN_NQN: Final = re.compile(
    rf"nqn\.\d{{4}}-(?:0[1-9]|1[0-2])\.({_LABEL}(?:\.{_LABEL})*):[^\x00-\x1f\x7f]+", re.ASCII | re.IGNORECASE
)
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConnectResult:
    """What a successful Connect returns (Base Figure 549). ``sq_flow_control``: SQHD is to be heeded."""

    controller_id: int
    needs_authentication: bool
    needs_secure_channel: bool
    sq_flow_control: bool


def check_nqn(nqn: str, *, what: str = "NQN") -> str:
    """``nqn``, or :class:`~meshfusion.jbof.errors.ConfigError` unless it has a form of Base 4.7.

    These are ``nqn.yyyy-mm.reverse.domain:anything`` and ``nqn.2014-08.org.nvmexpress:uuid:`` with a UUID, and the
    well-known name of discovery. At most 223 bytes of UTF-8.
    """
    try:
        length_bytes = len(nqn.encode())
    except UnicodeEncodeError:
        raise _bad_nqn(what, nqn, "cannot be written as UTF-8") from None
    if length_bytes > MAX_NQN_BYTES:
        raise _bad_nqn(what, nqn, f"has {length_bytes} bytes; {MAX_NQN_BYTES} are allowed")
    if nqn == DISCOVERY_NQN:
        return nqn
    match = _DOMAIN_NQN.fullmatch(nqn)
    if match is None or not nqn.startswith("nqn."):
        raise _bad_nqn(what, nqn, "has not the form nqn.yyyy-mm.reverse.domain:name")
    if match.group(1).lower() == "org.nvmexpress" and not (
        nqn.startswith(UUID_NQN_PREFIX) and _UUID.fullmatch(nqn, len(UUID_NQN_PREFIX))
    ):
        raise _bad_nqn(what, nqn, f"uses org.nvmexpress, which is for {UUID_NQN_PREFIX} and a UUID only")
    return nqn


def uuid_nqn(identity: uuid.UUID) -> str:
    """The NQN that stands for ``identity`` alone."""
    return f"{UUID_NQN_PREFIX}{identity}"


def connect_data(
    host_id: uuid.UUID, host_nqn: str, subsystem_nqn: str, *, controller_id: int = ANY_CONTROLLER
) -> bytes:
    """The 1024 bytes that Connect takes.

    For an I/O queue host, names and controller must be those of its admin queue, with the ``controller_id`` that
    Connect returned there. A host identifier of 0 stands for no host and is refused.
    """
    if host_id.int == 0:
        raise field_error("HOSTID", "is zero, which names no host")
    if controller_id != ANY_CONTROLLER:
        check_int("CNTLID", controller_id, 0, _MAX_CONTROLLER_ID)
    subsystem = check_nqn(subsystem_nqn, what="subsystem NQN").encode()
    host = check_nqn(host_nqn, what="host NQN").encode()
    return _DATA.pack(host_id.bytes, controller_id, subsystem, host)


def connect(
    queue_id: int,
    queue_depth: int,
    data: DataPointer,
    *,
    keep_alive_timeout_ms: int = 0,
    disable_sq_flow_control: bool = False,
) -> Command:
    """Make the RDMA connection, on which it is the first command, a queue pair (Base Figure 546).

    ``queue_depth`` counts entries. ``keep_alive_timeout_ms`` is for the admin queue (``queue_id`` 0), which over RDMA
    must have one (RDMA 3.4); targets round it up.
    """
    check_int("QID", queue_id, 0, MAX_QUEUE_ID)
    check_int("SQSIZE + 1", queue_depth, MIN_QUEUE_DEPTH, MAX_QUEUE_DEPTH)
    check_int("KATO", keep_alive_timeout_ms, 0 if queue_id else 1, 0 if queue_id else MAX_U32)
    if data.place is not DataPlace.REMOTE or data.length_bytes != CONNECT_DATA_BYTES:
        raise field_error("Connect data", f"must be {CONNECT_DATA_BYTES} bytes in one piece of registered memory")
    attributes = _DISABLE_SQ_FLOW_CONTROL if disable_sq_flow_control else 0
    specific = _CONNECT.pack(0, queue_id, queue_depth - 1, attributes, keep_alive_timeout_ms)
    return fabrics_command(FabricsType.CONNECT, specific, data)


def connect_result(result: int, sq_head: int) -> ConnectResult:
    """From the completion of a successful Connect (Base Figures 548 and 549)."""
    requirements = result >> 16
    return ConnectResult(
        controller_id=result & MAX_U16,
        needs_authentication=bool(requirements & 1 << 1),
        needs_secure_channel=bool(requirements & 1 << 2),
        sq_flow_control=sq_head != _SQ_FLOW_CONTROL_IS_OFF,
    )


def connect_fault(result: int) -> str:
    """Which parameter a target did not like, from a completion with Connect Invalid Parameters (Base Figure 549)."""
    part = "data" if result >> 16 & 1 else "command"
    return f"byte {result & MAX_U16} of the Connect {part}"


def property_get(offset: int, size_bytes: int) -> Command:
    """The result of its completion is the value (Base Figures 552 and 553)."""
    return fabrics_command(FabricsType.PROPERTY_GET, _PROPERTY.pack(_property_size(size_bytes), _offset(offset), 0))


def property_set(offset: int, size_bytes: int, value: int) -> Command:
    """Base Figure 554."""
    check_int("property value", value, 0, MAX_U64 if size_bytes == 8 else MAX_U32)
    specific = _PROPERTY.pack(_property_size(size_bytes), _offset(offset), value)
    return fabrics_command(FabricsType.PROPERTY_SET, specific)


def disconnect() -> Command:
    """End the I/O queue on which this is sent; for targets with bit 0 of OFCS (Base Figure 550)."""
    return fabrics_command(FabricsType.DISCONNECT, b"")


def authentication_send(data: DataPointer) -> Command:
    """One message to the target (Base chapter 6, Linux: ``nvmf_auth_send_command``); ``data`` is as long as it."""
    return _security(FabricsType.AUTHENTICATION_SEND, data)


def authentication_receive(data: DataPointer) -> Command:
    """The target's next message, of at most the length of ``data`` (Linux: ``nvmf_auth_receive_command``)."""
    return _security(FabricsType.AUTHENTICATION_RECEIVE, data)


def _security(kind: FabricsType, data: DataPointer) -> Command:
    if data.place is not DataPlace.REMOTE:
        raise field_error("authentication data", "must be one piece of registered memory")
    return fabrics_command(kind, _SECURITY.pack(*_DHCHAP_SPECIFIC, _NVME_PROTOCOL, data.length_bytes), data)


def _property_size(size_bytes: int) -> int:
    if size_bytes not in (4, 8):
        raise field_error("property size", f"is {size_bytes}; properties have 4 or 8 bytes")
    return 1 if size_bytes == 8 else 0


def _offset(offset: int) -> int:
    return check_int("OFST", offset, 0, MAX_U32)


def _bad_nqn(what: str, nqn: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{what} {nqn!r} {problem}",
        next_step="Write it as for example nqn.2014-08.com.example:storage.1, or use one made from a UUID.",
    )
