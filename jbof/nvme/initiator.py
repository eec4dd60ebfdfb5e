"""A subsystem of an NVMe/RDMA target, with calls that wait: connect, read, write, flush, deallocate, identify, close.

Everything has a deadline. What a call raises tells what became of it:

- :class:`~meshfusion.jbof.nvme.pending.FateUnknownError`: it may have been done, or be done later, and its memory is
  still in use;
- any other error: it failed, or parts of it, and its memory is free.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.auth import Authentication
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.bring_up import AssociationInfo
from meshfusion.jbof.nvme.controller import not_connected
from meshfusion.jbof.nvme.controller_effects import (
    Connected,
    ControllerEvent,
    ControllerLost,
    ControllerState,
    Disconnected,
    RequestEnded,
)
from meshfusion.jbof.nvme.inventory import Inventory, read_inventory
from meshfusion.jbof.nvme.io_commands import LbaRange
from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingRequest, PendingTransfer
from meshfusion.jbof.nvme.poller import Call, Poller
from meshfusion.jbof.nvme.rdma import RdmaTransport, Transport, array_region
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange
from meshfusion.jbof.nvme.session import MIN_ADMIN_SCRATCH, Session
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.transfer_effects import (
    SessionEffect,
    TransferDone,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)
from meshfusion.jbof.nvme.transfer_requests import Deallocate, Flush, Read, Request, Write, max_pieces

DEFAULT_TIMEOUT_S: Final = 10.0

_log: Final = logging.getLogger(__name__)
_RANGE_SCRATCH: Final = 8
_KILL_TIMEOUT_S: Final = 5.0


def connect(
    address: str,
    service: int,
    subsystem_nqn: str,
    host_nqn: str,
    host_id: uuid.UUID,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    source_address: str | None = None,
    on_event: Callable[[ControllerEvent], None] | None = None,
    **settings: Any,
) -> Initiator:
    """To ``subsystem_nqn`` at ``address`` and port ``service``, over RDMA. ``settings``: more of ControllerSettings.

    Raises :class:`~meshfusion.jbof.errors.MeshFusionError`: the target is not there, refuses, or cannot do what is
    needed.
    """
    deadline_s = time.monotonic() + timeout_s
    where = f"{subsystem_nqn} at {address} port {service}"
    wanted = ControllerSettings(subsystem_nqn, host_nqn, host_id, where, **settings)
    transport = RdmaTransport(address, service, deadline_s, source_address=source_address, key_scope=wanted.key_scope)
    return Initiator(transport, wanted, deadline_s - time.monotonic(), on_event=on_event)


class Initiator:
    """Over ``transport``, which is its own from now on. Its methods may be called from any thread.

    ``on_event`` hears of losses, reconnections and changes of namespaces, on whichever thread drives (see
    :mod:`meshfusion.jbof.nvme.poller`): it must not wait.
    Raises as :func:`connect` does; ``transport`` is closed then.
    """

    def __init__(
        self,
        transport: Transport,
        settings: ControllerSettings,
        connect_timeout_s: float,
        *,
        on_event: Callable[[ControllerEvent], None] | None = None,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._on_event = on_event
        self._is_closed = False
        self._crash: MediaError | None = None
        self._told_of_idle_key = False
        self._open: set[PendingTransfer | PendingRequest] = set()  # of the thread that drives
        self._connecting = PendingRequest(connect_timeout_s)
        self._closing: PendingRequest | None = None
        pools = transport.scratch_pool(MIN_ADMIN_SCRATCH), transport.scratch_pool(_RANGE_SCRATCH)
        self._session = Session(settings, *pools, random.random, secrets.token_bytes)
        self._poller = Poller(self._session, transport, self._on_effect, self._on_crash)
        self._poller.call(self._session.connect)
        try:
            self._connecting.wait()
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ControllerState:
        return self._session.controller.state

    @property
    def info(self) -> AssociationInfo | None:
        """What the controller said of itself; None while there is no connection."""
        return self._session.controller.info

    @property
    def max_descriptors(self) -> int:
        """Pieces of memory that one command may have. Raises while there is no connection."""
        info = self.info
        if info is None:
            raise not_connected(self._settings.where)
        return max_pieces(info, self._settings.key_scope)

    @property
    def inventory(self) -> Inventory:
        """Namespaces and how they are reached, as last read; empty while there is no connection."""
        return self._session.controller.inventory

    # ---- memory --------------------------------------------------------------------------------------------------

    def register(self, array: NDArray[Any]) -> RegisteredRegion:
        """Let the target reach the bytes of ``array``. It is kept until the region is closed."""
        return array_region(self._transport, array)

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        """The same for memory of ``owner``, which must stay where it is."""
        return self._transport.register(AddressRange(address, length_bytes), writable=writable, owner=owner)

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        """The same for a dma-buf. Raises :class:`~meshfusion.jbof.errors.UnsupportedError` where there is no way to."""
        return self._transport.register(memory, writable=writable, owner=owner)

    # ---- transfers -----------------------------------------------------------------------------------------------

    def read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Whole blocks from ``lba`` on into ``memory``."""
        self.begin_read(nsid, lba, memory, timeout_s=timeout_s).wait()

    def write(
        self,
        nsid: int,
        lba: int,
        memory: Sequence[RegionPart],
        *,
        force_unit_access: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """With ``force_unit_access`` it is durable when this returns."""
        self.begin_write(nsid, lba, memory, force_unit_access=force_unit_access, timeout_s=timeout_s).wait()

    def flush(self, nsid: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """What was written to the namespace before is durable when this returns."""
        self.begin(Flush(nsid), (), timeout_s).wait()

    def deallocate(self, nsid: int, ranges: Iterable[LbaRange], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.begin(Deallocate(nsid, tuple(ranges)), (), timeout_s).wait()

    def begin_read(
        self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> PendingTransfer:
        """Like :meth:`read`, without waiting."""
        return self.begin(Read(nsid, lba, [part.remote for part in memory]), memory, timeout_s)

    def begin_write(
        self,
        nsid: int,
        lba: int,
        memory: Sequence[RegionPart],
        *,
        force_unit_access: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PendingTransfer:
        """Like :meth:`write`, without waiting."""
        request = Write(nsid, lba, [part.remote for part in memory], force_unit_access)
        return self.begin(request, memory, timeout_s)

    def identify(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Inventory:
        """Read anew which namespaces there are, and how they are reached."""
        info = self.info
        if info is None:
            raise not_connected(self._settings.where)
        procedure = read_inventory(info.controller, info.capabilities.min_page_bytes)
        pending = PendingRequest(timeout_s)
        self._call(pending, lambda now_s: self._session.request(now_s, pending, procedure))
        inventory = pending.wait()
        assert isinstance(inventory, Inventory)
        return inventory

    def begin(self, request: Request, parts: Sequence[RegionPart], timeout_s: float) -> PendingTransfer:
        """Any request. ``parts``: the memory that it names, kept until it is free again."""
        asked_s = time.monotonic()
        deadline_s = asked_s + timeout_s
        pending = PendingTransfer(parts, deadline_s, self._poller)
        self._call(pending, lambda now_s: self._session.begin(now_s, pending, request, deadline_s), asked_s)
        return pending

    def _call(self, pending: PendingTransfer | PendingRequest, action: Call, asked_s: float | None = None) -> None:
        def begin(now_s: float) -> list[SessionEffect]:
            self._open.add(pending)
            return action(now_s)

        if self._crash is not None or self._is_closed:
            pending.end(error=self._crash or not_connected(self._settings.where))
        else:
            self._poller.call(begin, asked_s)

    def use_key(self, host_key: Secret) -> None:
        """Authenticate with this key whenever it connects anew. What is connected stays so."""
        if self._crash is None and not self._is_closed:
            self._poller.call(lambda now_s: self._session.use_key(now_s, host_key))

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Disconnect: in order for ``timeout_s``, then at once. Regions are closed with it; again is no error.

        Raises :class:`~meshfusion.jbof.errors.MediaError` if the death of a queue pair cannot be confirmed. Memory that
        transfers use is then still in use, for as long as the process lives.
        """
        if self._is_closed:
            return
        if not (timeout_s > 0 and self._disconnect(timeout_s, orderly=True)):
            self._disconnect(_KILL_TIMEOUT_S, orderly=False)
        self._poller.end(_KILL_TIMEOUT_S)
        if self._poller.is_alive or not self._transport.is_idle:
            raise MediaError(
                f"{self._settings.where}: the RDMA device does not confirm that every queue pair is gone",
                next_step="End the process before its memory is used for something else.",
            )
        self._is_closed = True
        self._transport.close()

    def _disconnect(self, timeout_s: float, *, orderly: bool) -> bool:
        """Was it done within ``timeout_s``?"""
        if self._crash is not None:
            return False
        self._closing = PendingRequest(timeout_s)
        self._poller.call(lambda now_s: self._session.disconnect(now_s, orderly=orderly))
        try:
            self._closing.wait()
        except MediaError:
            return False
        return True

    # ---- on the thread that drives -------------------------------------------------------------------------------

    def _on_effect(self, effect: SessionEffect) -> None:
        match effect:
            case TransferDone(PendingTransfer() as pending):
                self._open.remove(pending)
                pending.end()
            case TransferFailed(PendingTransfer() as pending, error, is_retryable):
                self._open.remove(pending)
                pending.end(error, is_retryable=is_retryable)
            case TransferInDoubt(PendingTransfer() as pending, error):
                pending.doubt(error)
            case TransferMemoryFree(PendingTransfer() as pending):
                self._open.remove(pending)
                pending.free_memory()
            case RequestEnded(PendingRequest() as request, result, error):
                self._open.remove(request)
                request.end(result, error)
            case _:
                self._on_controller(effect)

    def _on_controller(self, effect: Any) -> None:
        match effect:
            case Connected(info):
                self._note_idle_key(info)
                self._connecting.end(info)
            case ControllerLost(error):
                self._connecting.end(error=error)
            case Disconnected() if self._closing is not None:
                self._closing.end()
        if self._on_event is not None:
            try:
                self._on_event(effect)
            except Exception:
                _log.exception("on_event failed for %s", effect)

    def _note_idle_key(self, info: AssociationInfo) -> None:
        """Worth knowing, once: who set a key may believe that others are kept out."""
        is_idle = self._settings.host_key is not None and info.authentication is Authentication.NONE
        if is_idle and not self._told_of_idle_key:
            self._told_of_idle_key = True
            _log.info("%s: a key is set, but the target does not ask for authentication", self._settings.where)

    def _on_crash(self, cause: BaseException) -> None:
        """A bug of ours. Nobody is left waiting, and every queue pair is killed: no memory is touched unseen."""
        _log.critical("the NVMe poller ended", exc_info=cause)
        self._crash = MediaError(
            f"{self._settings.where}: the initiator's thread ended by a bug: {cause!r}",
            next_step="Report this as a bug; connect again with a new initiator.",
        )
        in_doubt = [pending for pending in self._open if isinstance(pending, PendingTransfer)]
        for pending in in_doubt:
            if not pending.has_ended:
                pending.doubt(self._crash)
        for request in (*self._open, self._connecting, self._closing):
            if isinstance(request, PendingRequest):
                request.end(error=self._crash)
        end_s = time.monotonic() + _KILL_TIMEOUT_S
        while (now_s := time.monotonic()) < end_s and not self._transport.is_idle:
            self._transport.kill_all(now_s)
            self._transport.poll(now_s)
        if self._transport.is_idle:
            for pending in in_doubt:
                pending.free_memory()
