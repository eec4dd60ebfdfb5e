"""Stands in for pyverbs: notes what is done, in order, and does what a test tells it to."""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from types import SimpleNamespace
from typing import Any


class FakeVerbsError(Exception):
    def __init__(self, message: str, error_code: int = 5) -> None:
        super().__init__(message)
        self.error_code = error_code


class FakeVerbs:
    """``log``: what was done. ``fails``: names in it that raise instead. Connection events are (kind, private data)."""

    PyverbsError = FakeVerbsError
    IBV_QPT_RC, IBV_QP_STATE = 2, 1
    IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR = "INIT", "RTR", "RTS", "ERR"
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ = 1, 2, 4
    IBV_SEND_SIGNALED, IBV_SEND_INLINE = 2, 8
    IBV_WC_SUCCESS, IBV_WC_WITH_INV, IBV_WC_IP_CSUM_OK = 0, 8, 4
    IBV_ACCESS_MW_BIND, IBV_MW_TYPE_2 = 16, 2
    IBV_WR_SEND, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW = 2, 7, 8
    IBV_DEVICE_MEM_WINDOW_TYPE_2A, IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 23, 1 << 24
    IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_IMM = 1, 2
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED = 0, 2
    RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_REJECTED = 5, 8
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_DISCONNECTED = 9, 10

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: set[str] = set()
        self.connection_events: deque[tuple[int, bytes]] = deque()
        self.completions: deque[Any] = deque()
        self.sent: list[tuple[int, bytes, int]] = []
        self.received: dict[int, bytes] = {}  # by work request
        self.parameters: dict[str, Any] = {}
        self.access_flags: Any = None
        self.max_inline_bytes = 64
        self.has_extended_queues = True
        self.poll_error = 0
        self.dev_name = "rxe0"
        self.address: dict[str, Any] = {}
        self.access = 0
        self.error_code = 5  # of what fails
        self.capsules: FakeMr
        self.capabilities = 1 << 24
        self.vendor = 0x2C9
        self.windows: list[FakeMw] = []
        self.binds: list[tuple[Any, ...]] = []  # key, region, address, length, access, flags
        self.invalidations: list[tuple[int, int, int]] = []  # work request, key, flags

    def do(self, what: str) -> None:
        if what in self.fails:
            raise FakeVerbsError(f"{what} failed", self.error_code)
        self.log.append(what)

    # The names below are pyverbs'.

    RDMA_PS_TCP = 6

    def AddrInfo(self, **fields: Any) -> dict[str, Any]:
        self.address = fields
        return fields

    def PD(self, context: Any) -> FakePd:
        return FakePd(self)

    def CMID(self, creator: Any) -> FakeCmid:
        return FakeCmid(self)

    def CQ(self, *_: Any) -> FakeCq:
        return FakeCq(self)

    def CQEX(self, context: Any, wanted: Any) -> FakeCqEx:
        if not self.has_extended_queues:
            raise FakeVerbsError("not supported")
        return FakeCqEx(self)

    def CqInitAttrEx(self, **fields: Any) -> dict[str, Any]:
        return fields

    def PollCqAttr(self) -> None: ...

    def QP(self, pd: Any, wanted: dict[str, Any]) -> FakeQp:
        if wanted["cap"]["max_inline_data"] > self.max_inline_bytes:
            raise FakeVerbsError("too much inline data")
        return FakeQp(self)

    def MR(self, pd: Any, length: int, access: int, address: int = 0) -> FakeMr:
        if address:
            self.do("register")
        self.access = access
        return FakeMr(self, length)

    def DmaBufMR(self, pd: Any, length: int, access: int, dmabuf: int, offset: int) -> FakeMr:
        self.do(f"register dma-buf {dmabuf} from {offset}")
        self.access = access
        return FakeMr(self, length)

    def QPCap(self, **fields: Any) -> dict[str, Any]:
        return fields

    def QPInitAttr(self, **fields: Any) -> dict[str, Any]:
        return fields

    def QPAttr(self, qp_state: str) -> FakeAttributes:
        return FakeAttributes(qp_state)

    def SGE(self, addr: int, length: int, lkey: int) -> FakePiece:
        return FakePiece(addr, length)

    def SendWR(
        self,
        wr_id: int = 0,
        opcode: int = IBV_WR_SEND,
        num_sge: int = 0,
        sg: list[FakePiece] | None = None,
        send_flags: int = IBV_SEND_SIGNALED,
    ) -> FakeWork:
        work = FakeWork(sg[0] if sg else None, wr_id)
        work.opcode, work.send_flags = opcode, send_flags
        return work

    def MW(self, pd: Any, kind: int) -> FakeMw:
        self.do("make window")
        made = FakeMw(rkey=len(self.windows) << 8 | 0xFF, handle=40 + len(self.windows), type=kind)
        made.verbs = self
        self.windows.append(made)
        return made

    def MWBindInfo(self, *fields: Any) -> tuple[Any, ...]:
        return fields

    def RecvWR(self, wr_id: int, num_sge: int, sg: list[FakePiece]) -> FakeWork:
        return FakeWork(sg[0], wr_id)

    def ConnParam(self, **fields: Any) -> FakeParameters:
        self.parameters = fields
        return FakeParameters(fields)


class FakePd:
    def __init__(self, verbs: FakeVerbs) -> None:
        self._verbs = verbs

    def close(self) -> None:
        self._verbs.do("close pd")


class FakeParameters:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def set_private_data(self, data: bytes) -> None:
        self.fields["private_data"] = data


class FakeAttributes:
    def __init__(self, state: str) -> None:
        self.state = state
        self.qp_access_flags = 0


class FakePiece:
    def __init__(self, addr: int, length: int) -> None:
        self.addr, self.length = addr, length


class FakeWork:
    def __init__(self, piece: FakePiece | None, wr_id: int = 0) -> None:
        self.sg_list, self.wr_id, self.send_flags = piece, wr_id, 0
        self.opcode, self.imm_data, self.rkey = 0, 0, 0
        self.bind: tuple[Any, ...] = ()

    def set_bind_wr(self, window: FakeMw, info: tuple[Any, ...]) -> None:
        """The new key is the next one of that which is noted in the window."""
        self.rkey = window.rkey & ~0xFF | (window.rkey + 1) & 0xFF
        self.bind = info


class FakeMw(ctypes.Structure):
    """As pyverbs.mr.MW: one word of the object points to its ibv_mw (infiniband/verbs.h)."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("rkey", ctypes.c_uint32),
        ("handle", ctypes.c_uint32),
        ("type", ctypes.c_int),
    )
    verbs: FakeVerbs

    def close(self) -> None:
        self.verbs.do("close window")


class FakeCompletion:
    def __init__(self, wr_id: int, status: int = 0, byte_len: int = 16, wc_flags: int = 0, imm_data: int = 0) -> None:
        self.wr_id, self.status, self.byte_len = wr_id, status, byte_len
        self.wc_flags, self.imm_data, self.vendor_err = wc_flags, imm_data, 0


class FakeMr:
    def __init__(self, verbs: FakeVerbs, length: int) -> None:
        self._verbs = verbs
        self.is_closed = False
        self.data = bytearray(length)
        self.buf, self.lkey, self.rkey = id(self.data), 1, 2
        self.name = "capsules" if length > 4096 else "responses"
        if self.name == "capsules":
            verbs.capsules = self

    def write(self, data: bytes, length: int, offset: int) -> None:
        self.data[offset : offset + length] = data

    def read(self, length: int, offset: int) -> bytes:
        return self._verbs.received[1 << 32 | offset // 16].ljust(length, b"\0")

    def close(self) -> None:
        """As pyverbs': a second time is no error."""
        if not self.is_closed:
            self._verbs.do(f"close {self.name}")
            self.is_closed = True


class FakeCq:
    def __init__(self, verbs: FakeVerbs) -> None:
        self._verbs = verbs

    def poll(self, count: int) -> tuple[int, list[FakeCompletion]]:
        self._verbs.do("poll") if "poll" in self._verbs.fails else None
        found = [self._verbs.completions.popleft() for _ in range(min(count, len(self._verbs.completions)))]
        return len(found), found

    def close(self) -> None:
        self._verbs.do("close cq")


class FakeCqEx(FakeCq):
    """ibv_start_poll(3): polling begins with a completion, or not at all, and is to be ended."""

    def __init__(self, verbs: FakeVerbs) -> None:
        super().__init__(verbs)
        self._current: FakeCompletion | None = None

    def start_poll(self, how: None) -> int:
        assert self._current is None
        if self._verbs.poll_error:
            return self._verbs.poll_error
        self._verbs.do("poll") if "poll" in self._verbs.fails else None
        if not self._verbs.completions:
            return errno.ENOENT
        self._current = self._verbs.completions.popleft()
        return 0

    def end_poll(self) -> None:
        assert self._current is not None
        self._current = None

    def __getattr__(self, name: str) -> Any:
        assert self._current is not None, "read outside of polling"
        if name in ("wr_id", "status"):
            return getattr(self._current, name)
        field = {"read_vendor_err": "vendor_err", "read_wc_flags": "wc_flags", "read_imm_data": "imm_data"}
        value = getattr(self._current, field.get(name, "byte_len" if name == "read_byte_len" else name))
        return lambda: value


class FakeQp:
    qp_num = 77

    def __init__(self, verbs: FakeVerbs) -> None:
        self._verbs = verbs
        verbs.do("create qp")

    def modify(self, attributes: FakeAttributes, mask: int) -> None:
        self._verbs.do(f"to {attributes.state}")
        if attributes.state == "INIT":
            self._verbs.access_flags = attributes.qp_access_flags

    def post_recv(self, work: FakeWork) -> None:
        self._verbs.do("receive")

    def post_send(self, work: FakeWork) -> None:
        verbs = self._verbs
        if work.opcode == verbs.IBV_WR_BIND_MW:
            verbs.do("bind")
            verbs.binds.append((work.rkey, *work.bind, work.send_flags))
            return
        if work.opcode == verbs.IBV_WR_LOCAL_INV:
            verbs.do("invalidate")
            verbs.invalidations.append((work.wr_id, work.imm_data, work.send_flags))
            return
        self._verbs.do("send")
        assert work.sg_list is not None
        capsules = self._verbs.capsules
        offset = work.sg_list.addr - capsules.buf
        self._verbs.sent.append(
            (work.wr_id, bytes(capsules.data[offset : offset + work.sg_list.length]), work.send_flags)
        )

    def close(self) -> None:
        self._verbs.do("destroy qp")


class FakeCmid:
    def __init__(self, verbs: FakeVerbs) -> None:
        self._verbs = verbs

    @property
    def context(self) -> SimpleNamespace:
        verbs = self._verbs
        device = SimpleNamespace(device_cap_flags=verbs.capabilities, vendor_id=verbs.vendor)
        return SimpleNamespace(name="rxe0", query_device=lambda: device)

    @property
    def dev_name(self) -> str:
        return self._verbs.dev_name

    def init_qp_attr(self, state: str) -> tuple[FakeAttributes, int]:
        return FakeAttributes(state), 1

    def resolve_addr(self, address: Any, timeout_ms: int) -> None:
        self._verbs.do("resolve address")

    def resolve_route(self, timeout_ms: int) -> None:
        self._verbs.do("resolve route")

    def connect(self, parameters: FakeParameters) -> None:
        self._verbs.do("connect")

    def establish(self) -> None:
        self._verbs.do("establish")

    def disconnect(self) -> None:
        self._verbs.do("disconnect")

    def close(self) -> None:
        self._verbs.do("close cmid")
