"""The reservation of one namespace, over a connected initiator, with calls that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.initiator import DEFAULT_TIMEOUT_S, Initiator
from meshfusion.jbof.nvme.reservations import (
    REPORT_BYTES,
    KeyChange,
    ReservationReport,
    ReservationType,
    acquire,
    encode_keys,
    parse_report,
    preempt_and_abort,
    register,
    release,
    report,
)
from meshfusion.jbof.nvme.sgl import DataPointer
from meshfusion.jbof.nvme.transfer_requests import Reserve

_PERSISTS: Final = 1 << 0  # of RESCAP (NVM Figure 114)


class ReservationHost:
    """As the host whose identifier the initiator connected with: all its controllers are one registrant.

    What its calls raise is as for :class:`~meshfusion.jbof.nvme.initiator.Initiator`; a
    :class:`~meshfusion.jbof.nvme.status.NvmeCommandError` of Reservation Conflict says that another host is in the way.
    """

    def __init__(self, initiator: Initiator, nsid: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._initiator = initiator
        self._nsid = nsid
        self._timeout_s = timeout_s

    def change_key(self, change: KeyChange, key: int) -> None:
        """``key``: the new one, or the one to give up."""
        old, new = (key, 0) if change is KeyChange.UNREGISTER else (0, key)
        namespace = self._initiator.inventory.namespaces.get(self._nsid)
        persist = namespace is not None and bool(namespace.info.rescap & _PERSISTS)
        self._send(encode_keys(old, new), lambda data: register(self._nsid, change, data, persist=persist))

    def acquire(self, key: int, kind: ReservationType) -> None:
        self._send(encode_keys(key, 0), lambda data: acquire(self._nsid, kind, data))

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        self._send(encode_keys(key, victim_key), lambda data: preempt_and_abort(self._nsid, kind, data))

    def release(self, key: int, kind: ReservationType) -> None:
        self._send(key.to_bytes(8, "little"), lambda data: release(self._nsid, kind, data))

    def report(self) -> ReservationReport:
        return parse_report(self._send(bytes(REPORT_BYTES), lambda data: report(self._nsid, data)))

    def _send(self, content: bytes, build: Callable[[DataPointer], Command]) -> bytes:
        """What its memory holds afterwards. That of a command in doubt stays registered until the initiator closes."""
        memory = np.frombuffer(bytearray(content), np.uint8)
        region = self._initiator.register(memory)
        request = Reserve(self._nsid, [region.remote], build)
        pending = self._initiator.begin(request, [region.all()], self._timeout_s)
        try:
            pending.wait()
        finally:
            if pending.wait_memory_free(0.0):
                region.close()
        return memory.tobytes()
