"""Completions of work requests, through pyverbs. Raises pyverbs' errors; nothing here waits.

Through the extended interface (ibv_start_poll(3)) where the device has it: through the plain one pyverbs makes an
object for each completion, whose constructor looks for a logger under logging's global lock.
"""

from __future__ import annotations

import errno
from typing import Any, Final, NamedTuple

from meshfusion.jbof.nvme.verbs_names import Verbs

_SOFT_ROCE_VENDORS: Final = (0, 0xFFFFFF)  # before Linux 5.9, and since


class WorkCompletion(NamedTuple):
    """``wr_id``: of the work request; ``status``: an ibv_wc_status, on whose success the last two depend.

    ``length_bytes`` is what was received; ``invalidated_key`` came with it to be invalidated, and now is.
    """

    wr_id: int
    status: int
    vendor_error: int = 0
    length_bytes: int = 0
    invalidated_key: int | None = None


class ExtendedQueue:
    """Raises on creation where the device does not have it. ``key_flag``: as of :func:`completion_queue`."""

    def __init__(self, verbs: Verbs, context: Any, entries: int, key_flag: int) -> None:
        wanted = verbs.IBV_WC_EX_WITH_BYTE_LEN | verbs.IBV_WC_EX_WITH_IMM
        self._verbs = verbs
        self._success, self._with_key = verbs.IBV_WC_SUCCESS, key_flag
        self.cq = verbs.CQEX(context, verbs.CqInitAttrEx(cqe=entries, wc_flags=wanted))
        self._how = verbs.PollCqAttr()

    def take(self, max_count: int) -> list[WorkCompletion]:
        """One by one: the ``rxe`` of rdma-core 44 loses a completion when ibv_next_poll finds no more."""
        taken: list[WorkCompletion] = []
        while len(taken) < max_count:
            code = self.cq.start_poll(self._how)
            if code == errno.ENOENT:  # there is none, and polling has not begun
                break
            if code:
                raise self._verbs.PyverbsError(f"polling for completions failed with error {code}")
            taken.append(self._current())
            self.cq.end_poll()
        return taken

    def _current(self) -> WorkCompletion:
        cq = self.cq
        status = cq.status
        if status != self._success:
            return WorkCompletion(cq.wr_id, int(status), int(cq.read_vendor_err()))
        # The invalidated key and immediate data share a field, which pyverbs knows by one of its names only.
        key = cq.read_imm_data() if cq.read_wc_flags() & self._with_key else None
        return WorkCompletion(cq.wr_id, status, 0, cq.read_byte_len(), key)


class PlainQueue:
    def __init__(self, verbs: Verbs, context: Any, entries: int, key_flag: int) -> None:
        self._with_key = key_flag
        self.cq = verbs.CQ(context, entries, None, None, 0)

    def take(self, max_count: int) -> list[WorkCompletion]:
        return [
            WorkCompletion(
                found.wr_id,
                int(found.status),
                int(found.vendor_err),
                found.byte_len,
                found.imm_data if found.wc_flags & self._with_key else None,
            )
            for found in self.cq.poll(max_count)[1]
        ]


def completion_queue(
    verbs: Verbs, context: Any, entries: int, *, key_flag: int | None = None
) -> ExtendedQueue | PlainQueue:
    """The better one that the device has. ``cq`` is pyverbs' object, to be closed by the caller.

    ``key_flag``: by which a completion tells that a key came with it, if that is not IBV_WC_WITH_INV.
    """
    key_flag = verbs.IBV_WC_WITH_INV if key_flag is None else key_flag
    try:
        return ExtendedQueue(verbs, context, entries, key_flag)
    except verbs.PyverbsError:
        return PlainQueue(verbs, context, entries, key_flag)


def invalidation_flag(verbs: Verbs, context: Any) -> int:
    """By which completions of this device tell that a key came with them.

    Linux' soft-RoCE passes the kernel's own flags on (do_complete in drivers/infiniband/sw/rxe/rxe_resp.c), where this
    one has the value that libibverbs gives to IBV_WC_IP_CSUM_OK; that has no meaning for queue pairs of type RC.
    """
    is_soft_roce = context.query_device().vendor_id in _SOFT_ROCE_VENDORS
    return int(verbs.IBV_WC_IP_CSUM_OK if is_soft_roce else verbs.IBV_WC_WITH_INV)
