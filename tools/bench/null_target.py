"""A target that does nothing, at once, and a transport to it that has no wire: what is left is the initiator's cost.

Work requests are built, posted and completed through our own queue pair code and pyverbs' own objects; only what needs
a device, the queue pair, its completions and its registered buffers, is replaced. Reads leave their memory as it was.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections import deque
from typing import Any, Final, cast

import numpy as np

from meshfusion.jbof.nvme.memory import RegionScratchPool, RegisteredRegion
from meshfusion.jbof.nvme.rdma_queue_pair import CompletedReceive, CompletedSend, Device, VerbsQueuePair
from meshfusion.jbof.nvme.registration import AddressRange, MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import (
    SCRATCH_BYTES,
    KillLink,
    LinkDead,
    LinkEvent,
    LinkUp,
    OpenLink,
    PostCapsule,
    Received,
    Sent,
    TransportEffect,
)
from meshfusion.jbof.nvme.verbs_names import Verbs, load_verbs

NSID: Final = 1
LBA_BYTES: Final = 4096
_LBA_COUNT: Final = 1 << 30
_CAPSULE_BYTES: Final = 320
_COMPLETIONS_PER_LINK: Final = 16
_RECEIVE: Final = 1 << 32  # as in rdma_queue_pair
_INVALID_FIELD: Final = 0x002 << 1
_CONTROLLER: Final = 1
_RESPONSES: Final = 1  # among the buffers of a queue pair, as they are made


class NullTransport:
    """Keeps the contract of :class:`~meshfusion.jbof.nvme.rdma.Transport`. Raises UnsupportedError without pyverbs."""

    def __init__(self) -> None:
        self._verbs = load_verbs()
        self._links: dict[int, _NullLink] = {}
        self._events: list[LinkEvent] = []
        self._next_key = 1

    def carry_out(self, now_s: float, effect: TransportEffect) -> None:
        match effect:
            case PostCapsule(link, command_id, capsule):
                self._links[link].post(command_id, capsule)
            case OpenLink(link, depth):
                self._links[link] = _NullLink(self._verbs, depth)
                self._events.append(LinkUp(link, struct.pack("<HH28x", 0, depth)))  # RDMA Figure 6
            case KillLink(link):
                self._links.pop(link).queue_pair.destroy()
                self._events.append(LinkDead(link))

    def poll(self, now_s: float) -> list[LinkEvent]:
        events, self._events = self._events, []
        for number, link in self._links.items():
            for item in link.queue_pair.take_completions(_COMPLETIONS_PER_LINK):
                match item:
                    case CompletedSend(command_id):
                        events.append(Sent(number, command_id))
                    case CompletedReceive(data, key):
                        events.append(Received(number, data, key))
        return events

    def kill_all(self, now_s: float) -> None:
        for number in list(self._links):
            self.carry_out(now_s, KillLink(number))

    @property
    def is_idle(self) -> bool:
        return not self._links

    def register(self, memory: MemoryRange, *, writable: bool, owner: object) -> RegisteredRegion:
        self._next_key += 1
        return RegisteredRegion(
            RemoteMemory(memory.first_iova, memory.length_bytes, self._next_key), owner, lambda: None
        )

    def scratch_pool(self, count: int) -> RegionScratchPool:
        buffer = np.zeros(count * SCRATCH_BYTES, np.uint8)
        return RegionScratchPool(
            self.register(AddressRange(buffer.ctypes.data, buffer.nbytes), writable=True, owner=buffer), buffer
        )

    def close(self) -> None:
        assert self.is_idle


class _NullLink:
    """A queue pair whose work completes when it is posted."""

    def __init__(self, verbs: Verbs, depth: int) -> None:
        self._verbs = _NullVerbs(verbs)
        device = Device(cast(Verbs, self._verbs), None, None, None, "nowhere", _CAPSULE_BYTES)
        self.queue_pair = VerbsQueuePair(device, depth)
        self.queue_pair.post_receives()

    def post(self, command_id: int, capsule: bytes) -> None:
        self.queue_pair.post_send(command_id, capsule)
        self._verbs.queue.work.append((command_id, 0))
        response = answer(capsule)
        if response is not None:
            receive = self._verbs.queue.receives.popleft()
            self._verbs.buffers[_RESPONSES].write(response, len(response), (receive ^ _RECEIVE) * len(response))
            self._verbs.queue.work.append((receive, len(response)))


def answer(capsule: bytes) -> bytes | None:
    """The response to it (Base Figures 91 to 99); None for a request for events. Identify data is written at once."""
    result, status = 0, 0
    match capsule[0], capsule[4 if capsule[0] == 0x7F else 40]:
        case 0x7F, 0x01:  # Connect
            result = _CONTROLLER
        case 0x7F, 0x04:  # Property Get: CAP (Base Figure 36) or CSTS, which is ready and shut down
            result = 127 | 1 << 16 | 1 << 24 | 1 << 37 if capsule[44] == 0 else 1 | 2 << 2
        case 0x06, (0x00 | 0x01 | 0x02) as cns:
            address, keyed = struct.unpack_from("<QQ", capsule, 24)
            data = _IDENTIFY[cns]
            ctypes.memmove(address, data, min(len(data), keyed & 0xFFFFFF))
        case 0x09, 0x07:  # Set Features: as many queues as are asked for
            (result,) = struct.unpack_from("<I", capsule, 44)
        case (0x06, _):
            status = _INVALID_FIELD
        case 0x0C, _:
            return None
    return struct.pack("<QHH2sH", result, 0, 0, capsule[2:4], status)


def _identify_controller() -> bytes:
    """Base Figure 313."""
    data = bytearray(4096)
    struct.pack_into("<H", data, 78, _CONTROLLER)
    data[111] = 1  # CNTRLTYPE: I/O
    struct.pack_into("<H", data, 320, 1)  # KAS
    data[512], data[513] = 0x66, 0x44
    struct.pack_into("<I", data, 516, 1)  # NN
    struct.pack_into("<I", data, 536, 1 | 1 << 2)  # SGLS: keyed
    struct.pack_into("<II", data, 1792, 4, 1)  # IOCCSZ, IORCSZ
    data[1803] = 1  # MSDBD
    return bytes(data)


def _identify_namespace() -> bytes:
    """NVM Figure 114."""
    data = bytearray(4096)
    struct.pack_into("<QQQ", data, 0, *[_LBA_COUNT] * 3)
    data[130] = LBA_BYTES.bit_length() - 1
    return bytes(data)


_IDENTIFY: Final = {
    0x00: _identify_namespace(),
    0x01: _identify_controller(),
    0x02: struct.pack("<I", NSID).ljust(4096, b"\0"),
}


class _NullVerbs:
    """pyverbs, but for what needs a device. For one queue pair."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs
        self.queue = _NullQueue()
        self.buffers: list[_NullMr] = []

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(self._verbs, name)
        return value

    def CQ(self, *_: Any) -> _NullQueue:
        return self.queue

    def CQEX(self, *_: Any) -> _NullQueue:
        return self.queue

    def QP(self, *_: Any) -> _NullQueue:
        return self.queue

    def MR(self, pd: Any, length_bytes: int, access: int) -> _NullMr:
        self.buffers.append(_NullMr(length_bytes))
        return self.buffers[-1]

    def QPInitAttr(self, **_: Any) -> None: ...


class _NullMr:
    lkey = 0

    def __init__(self, length_bytes: int) -> None:
        self._memory = bytearray(length_bytes)
        self.buf = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def write(self, data: bytes, length_bytes: int, offset_bytes: int) -> None:
        self._memory[offset_bytes : offset_bytes + length_bytes] = data

    def read(self, length_bytes: int, offset_bytes: int) -> bytes:
        return bytes(self._memory[offset_bytes : offset_bytes + length_bytes])

    def close(self) -> None: ...


class _NullQueue:
    """Queue pair and completion queue in one. ``receives``: identifiers; ``work``: identifier and length, done."""

    qp_num = 1
    status = 0
    wr_id = 0

    def __init__(self) -> None:
        self._length_bytes = 0
        self.receives: deque[int] = deque()
        self.work: deque[tuple[int, int]] = deque()

    def post_recv(self, work: Any) -> None:
        self.receives.append(work.wr_id)

    def post_send(self, work: Any) -> None: ...

    def start_poll(self, _: Any) -> int:
        if not self.work:
            return errno.ENOENT
        self.wr_id, self._length_bytes = self.work.popleft()
        return 0

    def end_poll(self) -> None: ...

    def read_byte_len(self) -> int:
        return self._length_bytes

    def read_wc_flags(self) -> int:
        return 0

    def close(self) -> None: ...
