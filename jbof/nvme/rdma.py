"""The transport over RDMA: connections through the connection manager, queue pairs of our own, registered memory.

One thread uses it at a time, and no call waits except the constructor: connection events are polled like completions
(see :mod:`meshfusion.jbof.nvme.rdma_events` for why). All links lie on one device and in one protection domain, so
that memory registered once serves every queue, also after a reconnection.
"""

from __future__ import annotations

import itertools
import select
import socket
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.memory import RegionScratchPool, RegisteredRegion
from meshfusion.jbof.nvme.rdma_completions import invalidation_flag
from meshfusion.jbof.nvme.rdma_events import EventChannel
from meshfusion.jbof.nvme.rdma_link import RESOLVE_TIMEOUT_MS, LinkState, RdmaLink
from meshfusion.jbof.nvme.rdma_queue_pair import Device
from meshfusion.jbof.nvme.rdma_window import check_windows
from meshfusion.jbof.nvme.registration import AddressRange, MemoryRange, deregister, register_range
from meshfusion.jbof.nvme.sgl import DESCRIPTOR_BYTES, MAX_LIST_DESCRIPTORS, RemoteMemory
from meshfusion.jbof.nvme.transport import (
    SCRATCH_BYTES,
    InvalidateKey,
    KillLink,
    LinkDead,
    LinkEvent,
    OpenLink,
    PostCapsule,
    ScratchPool,
    TransportEffect,
)
from meshfusion.jbof.nvme.verbs_names import load_verbs

MAX_CAPSULE_BYTES: Final = 64 + MAX_LIST_DESCRIPTORS * DESCRIPTOR_BYTES

_CONNECTING_POLL_S: Final = 0.002
_CONNECTED_POLL_S: Final = 0.02  # only a loss is to be heard of, which completions tell as well
_COMPLETIONS_PER_LINK: Final = 16


class Transport(Protocol):
    """What an initiator needs of a transport, besides the contract of :mod:`meshfusion.jbof.nvme.transport`."""

    def carry_out(self, now_s: float, effect: TransportEffect) -> None: ...

    def poll(self, now_s: float) -> list[LinkEvent]:
        """What happened since, bounded."""
        ...

    def kill_all(self, now_s: float) -> None:
        """Kill every link that is not being killed yet: for when nobody keeps account of them any more."""
        ...

    @property
    def is_idle(self) -> bool:
        """Every link is dead."""
        ...

    def register(self, memory: MemoryRange, *, writable: bool, owner: object) -> RegisteredRegion: ...

    def scratch_pool(self, count: int) -> ScratchPool: ...

    def close(self) -> None:
        """When all links are dead. Ends all registrations: no key that was given out opens anything any more."""
        ...


class RdmaTransport:
    """Over the device that leads to ``address`` and port ``service``. ``deadline_s``: for finding it.

    ``source_address`` chooses the device where several lead there. Memory that is registered is reached through
    windows only where ``key_scope`` is the command; that of scratch pools, which is our own, by its region's key.
    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` without pyverbs or the kernel's part of it, or if the
    device has no windows where they are needed, :class:`~meshfusion.jbof.errors.MediaError` if none leads there.
    """

    def __init__(
        self,
        address: str,
        service: int,
        deadline_s: float,
        *,
        source_address: str | None = None,
        key_scope: KeyScope = KeyScope.REGION,
    ) -> None:
        self._key_scope = key_scope
        self._verbs = verbs = load_verbs()
        self._links: dict[int, RdmaLink] = {}
        self._poller = select.poll()
        self._by_fd: dict[int, RdmaLink] = {}
        self._next_connection_poll_s = 0.0
        self._regions: dict[int, RegisteredRegion] = {}  # that are open
        self._region_numbers = itertools.count()
        where = f"{address} port {service}"
        # Holds the device open: librdmacm closes what no connection uses, and with it all that is registered there.
        self._anchor_channel = EventChannel(verbs)
        self._anchor: Any = None
        try:
            target = verbs.AddrInfo(
                src=source_address, dst=_number(address), dst_service=str(service), port_space=verbs.RDMA_PS_TCP
            )
            self._anchor = verbs.CMID(creator=self._anchor_channel.channel)
            self._anchor.resolve_addr(target, RESOLVE_TIMEOUT_MS)
            self._anchor_channel.wait_for(verbs.RDMA_CM_EVENT_ADDR_RESOLVED, deadline_s)
            self._anchor.resolve_route(RESOLVE_TIMEOUT_MS)
            self._anchor_channel.wait_for(verbs.RDMA_CM_EVENT_ROUTE_RESOLVED, deadline_s)
            key_flag = None
            if key_scope is KeyScope.COMMAND:
                check_windows(verbs, self._anchor.context)
                key_flag = invalidation_flag(verbs, self._anchor.context)
            pd = verbs.PD(self._anchor.context)
        except verbs.PyverbsError as error:
            self._close_anchor()
            raise MediaError(
                f"{where}: no RDMA device leads there: {error}",
                next_step="Check the address, and that its network interface has an RDMA device (rdma link).",
            ) from error
        except MeshFusionError:
            self._close_anchor()
            raise
        self._bindable: dict[int, Any] = {}  # pyverbs' regions that windows may be bound to, by number
        self._device = Device(
            verbs, target, self._anchor.context, pd, where, MAX_CAPSULE_BYTES, self._bindable, key_flag
        )

    @property
    def device_name(self) -> str:
        return str(self._device.context.name)

    # ---- links ---------------------------------------------------------------------------------------------------

    def carry_out(self, now_s: float, effect: TransportEffect) -> None:
        match effect:
            case PostCapsule(number):
                self._links[number].post(effect)
            case InvalidateKey(number):
                self._links[number].invalidate(effect)
            case OpenLink(number):
                link = self._links[number] = RdmaLink(self._device, effect)
                self._next_connection_poll_s = now_s
                if link.event_fd is not None:
                    self._by_fd[link.event_fd] = link
                    self._poller.register(link.event_fd, select.POLLIN)
            case KillLink(number):
                self._kill(now_s, self._links[number])

    def poll(self, now_s: float) -> list[LinkEvent]:
        if now_s >= self._next_connection_poll_s and self._by_fd:
            for fd, _ in self._poller.poll(0):
                self._by_fd[fd].poll_connection()
            is_up = all(link.state is LinkState.UP for link in self._links.values())
            self._next_connection_poll_s = now_s + (_CONNECTED_POLL_S if is_up else _CONNECTING_POLL_S)
        events: list[LinkEvent] = []
        for link in self._links.values():
            events += link.poll(now_s, _COMPLETIONS_PER_LINK)
        for event in events:
            if type(event) is LinkDead:
                del self._links[event.link]
        return events

    def kill_all(self, now_s: float) -> None:
        for link in self._links.values():
            if link.state is not LinkState.DRAINING:
                self._kill(now_s, link)

    @property
    def is_idle(self) -> bool:
        return not self._links

    def _kill(self, now_s: float, link: RdmaLink) -> None:
        link.kill(now_s)
        if link.event_fd is not None and self._by_fd.pop(link.event_fd, None) is not None:
            self._poller.unregister(link.event_fd)

    # ---- memory --------------------------------------------------------------------------------------------------

    def register(self, memory: MemoryRange, *, writable: bool, owner: object) -> RegisteredRegion:
        """Let targets read, and if ``writable`` write, these bytes. ``owner`` is what keeps them where they are.

        Raises what :func:`~meshfusion.jbof.nvme.registration.register_range` raises.
        """
        return self._register(memory, writable, owner, self._key_scope)

    def _register(self, memory: MemoryRange, writable: bool, owner: object, key_scope: KeyScope) -> RegisteredRegion:
        made = register_range(
            self._verbs,
            self._device.pd,
            memory,
            writable=writable,
            device_name=self.device_name,
            key_scope=key_scope,
        )
        number = next(self._region_numbers)
        key = made.rkey
        if key_scope is KeyScope.COMMAND:
            key = number
            self._bindable[number] = made.mr
        remote = RemoteMemory(memory.first_iova, memory.length_bytes, key)
        self._regions[number] = RegisteredRegion(remote, owner, partial(self._deregister, number, made.mr))
        return self._regions[number]

    def _deregister(self, number: int, mr: Any) -> None:
        deregister(self._verbs, mr)
        self._regions.pop(number)
        self._bindable.pop(number, None)

    def scratch_pool(self, count: int) -> RegionScratchPool:
        buffer = np.zeros(count * SCRATCH_BYTES, np.uint8)
        memory = AddressRange(buffer.ctypes.data, buffer.nbytes)
        return RegionScratchPool(self._register(memory, True, buffer, KeyScope.REGION), buffer)

    def close(self) -> None:
        """Regions that are still open are revoked: no queue pair is left that could reach them.

        Raises :class:`~meshfusion.jbof.errors.MediaError` when one cannot be, after all others. The device stays open.
        """
        assert not self._links, "links are to be dead first"
        errors: list[MediaError] = []
        for region in list(self._regions.values()):
            try:
                region.revoke()
            except MediaError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._device.pd.close()
        self._close_anchor()

    def _close_anchor(self) -> None:
        with suppress(self._verbs.PyverbsError):
            if self._anchor is not None:
                self._anchor.close()
            self._anchor_channel.close()


def _number(address: str) -> str:
    """Looked up here, where waiting for a name server does not stop the process as it would inside of pyverbs."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"the address {address} is not known: {error}", next_step="Check the address.") from error
    return str(found[0][4][0])


def array_region(transport: Transport, array: NDArray[Any]) -> RegisteredRegion:
    """Register the bytes of ``array``, which must lie in one piece. They stay where they are until it is closed."""
    if not array.flags.c_contiguous or array.nbytes == 0:
        raise ConfigError(
            f"an array of shape {array.shape} and strides {array.strides} does not lie in one piece",
            next_step="Register the array that it is a view of, or a copy (numpy.ascontiguousarray).",
        )
    memory = AddressRange(array.ctypes.data, array.nbytes)
    return transport.register(memory, writable=bool(array.flags.writeable), owner=array)
