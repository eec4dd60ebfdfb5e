"""An RDMA queue pair with its buffers, through pyverbs. Raises pyverbs' errors; nothing here waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.completion import COMPLETION_BYTES
from meshfusion.jbof.nvme.rdma_completions import WorkCompletion, completion_queue
from meshfusion.jbof.nvme.rdma_window import VerbsWindow
from meshfusion.jbof.nvme.transport import Bind
from meshfusion.jbof.nvme.verbs_names import Verbs

# In a work request's identifier: what it is, if it is not a send.
_RECEIVE: Final = 1 << 32
_BIND: Final = 1 << 33
_INVALIDATION: Final = 1 << 34


class Device(NamedTuple):
    """What links share. ``context`` and ``pd`` are pyverbs' objects of the device that leads to the target.

    ``address`` is the target's, as pyverbs' AddrInfo; ``where`` names it in errors. ``bindable``: the regions that
    windows may be bound to, by their numbers; ``key_flag``: see :func:`~.rdma_completions.completion_queue`.
    """

    verbs: Verbs
    address: Any
    context: Any
    pd: Any
    where: str
    max_capsule_bytes: int
    bindable: Mapping[int, Any] = {}
    key_flag: int | None = None


class CompletedSend(NamedTuple):
    command_id: int


class CompletedReceive(NamedTuple):
    data: bytes
    invalidated_key: int | None


class CompletedInvalidation(NamedTuple):
    command_id: int


class FailedWork(NamedTuple):
    """``status``: an ibv_wc_status."""

    status: int
    vendor_error: int


Completed = CompletedSend | CompletedReceive | CompletedInvalidation | FailedWork


class VerbsQueuePair:
    """For ``depth`` capsules in flight and as many responses; in the RESET state. With ``window_count`` windows."""

    def __init__(self, device: Device, depth: int, window_count: int = 0) -> None:
        self._verbs = device.verbs
        self._depth = depth
        self._stride_bytes = device.max_capsule_bytes
        # A bind completes only if it fails or is flushed, and there is an invalidation at most for each.
        self._max_sends = depth + 2 * window_count
        self._bindable = device.bindable
        self._completions = completion_queue(
            self._verbs, device.context, self._max_sends + depth + 1, key_flag=device.key_flag
        )
        self._cq: Any = self._completions.cq
        self._qp: Any = None
        self._inline_bytes = 0
        self._capsules: Any = None
        self._responses: Any = None
        self._sends: list[tuple[Any, Any]] = []  # a slot: its work request and the piece of memory that it sends
        self._receives: list[Any] = []
        self._free_slots: deque[int] = deque(range(depth))
        self._slots: dict[int, int] = {}  # by command identifier
        self._windows: list[VerbsWindow] = []
        self._invalidation: Any = None
        self._invalidations = 0
        self._receives_posted = 0
        try:
            self._create(device)
            self._make_buffers(device)
            for window in range(window_count):
                self._windows.append(VerbsWindow(self._verbs, device.pd, _BIND | window))
        except (self._verbs.PyverbsError, MeshFusionError):
            self.destroy()
            raise

    @property
    def number(self) -> int:
        return int(self._qp.qp_num)

    @property
    def window_keys(self) -> tuple[int, ...]:
        return tuple(window.key for window in self._windows)

    @property
    def under_way(self) -> int:
        """Work requests that have not completed; binds come before sends."""
        return len(self._slots) + self._receives_posted + self._invalidations

    def modify(self, attributes: Any, mask: int) -> None:
        self._qp.modify(attributes, mask)

    def post_receives(self) -> None:
        """All of them; in the INIT state or later."""
        for receive in self._receives:
            self._qp.post_recv(receive)
            self._receives_posted += 1

    def fail(self) -> None:
        """To the ERR state: what is under way completes as flushed, and nothing the peer sends is heeded any more."""
        verbs = self._verbs
        self._qp.modify(verbs.QPAttr(qp_state=verbs.IBV_QPS_ERR), verbs.IBV_QP_STATE)

    def post_send(self, command_id: int, capsule: bytes, bind: Bind | None = None) -> None:
        """``bind`` before it: the device does what follows a bind when that is done (ibv_bind_mw(3))."""
        assert len(capsule) <= self._stride_bytes
        if bind is not None:
            verbs, memory = self._verbs, bind.memory
            access = verbs.IBV_ACCESS_REMOTE_WRITE if bind.is_written else verbs.IBV_ACCESS_REMOTE_READ
            mr = self._bindable[memory.rkey]
            self._windows[bind.window].bind(self._qp, bind.key, mr, memory.address, memory.length_bytes, access)
        slot = self._free_slots.popleft()
        self._slots[command_id] = slot
        self._capsules.write(capsule, len(capsule), self._stride_bytes * slot)
        send, piece = self._sends[slot]
        piece.length = len(capsule)
        send.wr_id = command_id
        send.send_flags = self._verbs.IBV_SEND_SIGNALED
        if len(capsule) <= self._inline_bytes:
            send.send_flags |= self._verbs.IBV_SEND_INLINE
        self._qp.post_send(send)

    def post_invalidation(self, command_id: int, key: int) -> None:
        """The key is dead when it has completed."""
        verbs = self._verbs
        if self._invalidation is None:
            self._invalidation = verbs.SendWR(opcode=verbs.IBV_WR_LOCAL_INV)
        self._invalidation.wr_id = _INVALIDATION | command_id
        self._invalidation.imm_data = key  # ibv_send_wr.invalidate_rkey, with which it shares its place
        self._qp.post_send(self._invalidation)
        self._invalidations += 1

    def take_completions(self, max_count: int) -> list[Completed]:
        """Receives that completed well are posted again."""
        verbs = self._verbs
        taken: list[Completed] = []
        for completion in self._completions.take(max_count):
            work, status = completion.wr_id, completion.status
            if work & _RECEIVE:
                self._receives_posted -= 1
                if status == verbs.IBV_WC_SUCCESS:
                    taken.append(self._response(completion, work ^ _RECEIVE))
            elif work & _INVALIDATION:
                self._invalidations -= 1
                if status == verbs.IBV_WC_SUCCESS:
                    taken.append(CompletedInvalidation(work ^ _INVALIDATION))
            elif not work & _BIND:
                self._free_slots.append(self._slots.pop(work))
                if status == verbs.IBV_WC_SUCCESS:
                    taken.append(CompletedSend(work))
            if status != verbs.IBV_WC_SUCCESS:
                taken.append(FailedWork(status, completion.vendor_error))
        return taken

    def destroy(self) -> None:
        """Nobody reaches memory through it any more when this returns. Raises if that is not sure: try again.

        Windows first: Linux' soft-RoCE ends a queue pair only when no window is bound to it.
        """
        for window in self._windows:
            window.close()
        self._windows.clear()
        if self._qp is not None:
            self._qp.close()
            self._qp = None
        for thing in (self._capsules, self._responses, self._cq):
            if thing is not None:
                with suppress(self._verbs.PyverbsError):  # a leak, but a harmless one
                    thing.close()
        self._capsules = self._responses = self._cq = None

    def _response(self, completion: WorkCompletion, slot: int) -> CompletedReceive:
        data = self._responses.read(COMPLETION_BYTES, COMPLETION_BYTES * slot)[: completion.length_bytes]
        self._qp.post_recv(self._receives[slot])
        self._receives_posted += 1
        return CompletedReceive(data, completion.invalidated_key)

    def _create(self, device: Device) -> None:
        """With room for capsules inside of work requests, if the device has it."""
        verbs = self._verbs
        for inline_bytes in (self._stride_bytes, 64, 0):
            cap = verbs.QPCap(
                max_send_wr=self._max_sends,
                max_recv_wr=self._depth,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=inline_bytes,
            )
            wanted = verbs.QPInitAttr(qp_type=verbs.IBV_QPT_RC, cap=cap, scq=self._cq, rcq=self._cq, sq_sig_all=0)
            try:
                self._qp = verbs.QP(device.pd, wanted)
            except verbs.PyverbsError:
                if inline_bytes == 0:
                    raise
            else:
                self._inline_bytes = inline_bytes
                return

    def _make_buffers(self, device: Device) -> None:
        """Work requests are made once, for pyverbs 44 leaks the parts of each."""
        verbs, pd, stride = self._verbs, device.pd, self._stride_bytes
        self._capsules = verbs.MR(pd, stride * self._depth, verbs.IBV_ACCESS_LOCAL_WRITE)
        self._responses = verbs.MR(pd, COMPLETION_BYTES * self._depth, verbs.IBV_ACCESS_LOCAL_WRITE)
        for slot in range(self._depth):
            piece = verbs.SGE(self._capsules.buf + stride * slot, stride, self._capsules.lkey)
            send = verbs.SendWR(num_sge=1, sg=[piece])
            send.sg_list = piece  # by reference: its length is set for each capsule
            self._sends.append((send, piece))
            room = verbs.SGE(self._responses.buf + COMPLETION_BYTES * slot, COMPLETION_BYTES, self._responses.lkey)
            self._receives.append(verbs.RecvWR(wr_id=_RECEIVE | slot, num_sge=1, sg=[room]))
