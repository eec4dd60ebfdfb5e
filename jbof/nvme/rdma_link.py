"""One RDMA connection of the transport: from the target's address to the end of its queue pair. Nothing here waits."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.rdma_cm import rejected
from meshfusion.jbof.nvme.rdma_events import EventChannel
from meshfusion.jbof.nvme.rdma_queue_pair import (
    CompletedInvalidation,
    CompletedReceive,
    CompletedSend,
    Device,
    FailedWork,
    VerbsQueuePair,
)
from meshfusion.jbof.nvme.transport import (
    InvalidateKey,
    KeyInvalidated,
    LinkBroken,
    LinkDead,
    LinkEvent,
    LinkUp,
    OpenLink,
    PostCapsule,
    Received,
    Sent,
)

RESOLVE_TIMEOUT_MS: Final = 2000

_DRAIN_S: Final = 0.5
_MAX_RETRIES: Final = 7  # of a send; and without end while the peer has no receive buffer (ibv_modify_qp(3))
_ALL_READS: Final = 255  # responder resources: as many RDMA reads at a time as the device can answer (librdmacm)


class LinkState(enum.Enum):
    RESOLVING_ADDRESS = "resolving address"
    RESOLVING_ROUTE = "resolving route"
    CONNECTING = "connecting"
    UP = "up"
    BROKEN = "broken"  # and waits to be killed
    DRAINING = "draining"
    DEAD = "dead"


class RdmaLink:
    """Keeps the contract of :mod:`meshfusion.jbof.nvme.transport`. pyverbs' errors break it; they are not raised."""

    def __init__(self, device: Device, request: OpenLink) -> None:
        self.link = request.link
        self.state = LinkState.RESOLVING_ADDRESS
        self._device = device
        self._request = request
        self._events: list[LinkEvent] = []
        self._channel: EventChannel | None = None
        self._cmid: Any = None
        self._queue_pair: VerbsQueuePair | None = None
        self._drain_end_s = 0.0
        self._try(self._resolve)

    @property
    def event_fd(self) -> int | None:
        """Readable when :meth:`poll_connection` has something to take; stays the same."""
        return self._channel.fd if self._channel is not None else None

    # ---- for the transport ---------------------------------------------------------------------------------------

    def poll(self, now_s: float, max_count: int) -> list[LinkEvent]:
        """What happened since. At most ``max_count`` completions are taken."""
        if self._queue_pair is not None and self.state in (LinkState.UP, LinkState.DRAINING):
            self._try(lambda: self._take_completions(max_count))
        if self.state is LinkState.DRAINING:
            under_way = self._queue_pair.under_way if self._queue_pair is not None else 0
            if under_way == 0 or now_s >= self._drain_end_s:
                self._destroy()
        events, self._events = self._events, []
        return events

    def poll_connection(self) -> None:
        """Take an event of the connection manager; what it means comes with :meth:`poll`."""
        self._try(self._take_connection_event)

    def post(self, effect: PostCapsule) -> None:
        if self.state is LinkState.UP and self._queue_pair is not None:
            queue_pair = self._queue_pair
            self._try(lambda: queue_pair.post_send(effect.command_id, effect.capsule, effect.bind))

    def invalidate(self, effect: InvalidateKey) -> None:
        if self.state is LinkState.UP and self._queue_pair is not None:
            queue_pair = self._queue_pair
            self._try(lambda: queue_pair.post_invalidation(effect.command_id, effect.key))

    def kill(self, now_s: float) -> None:
        """Begin to end it. What is under way is flushed, for a while; then the queue pair is destroyed."""
        was_up = self.state is LinkState.UP
        self.state = LinkState.DRAINING
        self._drain_end_s = now_s + _DRAIN_S
        with suppress(self._device.verbs.PyverbsError):
            if was_up:
                self._cmid.disconnect()  # so that the target need not find out by itself
        with suppress(self._device.verbs.PyverbsError):
            if self._queue_pair is not None:
                self._queue_pair.fail()

    # ---- connecting ----------------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        verbs = self._device.verbs
        self._channel = EventChannel(verbs)
        self._cmid = verbs.CMID(creator=self._channel.channel)
        self._cmid.resolve_addr(self._device.address, RESOLVE_TIMEOUT_MS)

    def _take_connection_event(self) -> None:
        event = self._channel.next_event() if self._channel is not None else None
        if event is None or self.state in (LinkState.BROKEN, LinkState.DRAINING, LinkState.DEAD):
            return
        verbs = self._device.verbs
        match self.state, event.kind:
            case LinkState.RESOLVING_ADDRESS, verbs.RDMA_CM_EVENT_ADDR_RESOLVED:
                self.state = LinkState.RESOLVING_ROUTE
                self._cmid.resolve_route(RESOLVE_TIMEOUT_MS)
            case LinkState.RESOLVING_ROUTE, verbs.RDMA_CM_EVENT_ROUTE_RESOLVED:
                self.state = LinkState.CONNECTING
                self._connect()
            case LinkState.CONNECTING, verbs.RDMA_CM_EVENT_CONNECT_RESPONSE:
                self._move(verbs.IBV_QPS_RTR)
                self._move(verbs.IBV_QPS_RTS)
                self._cmid.establish()
                self.state = LinkState.UP
                assert self._queue_pair is not None
                self._events.append(LinkUp(self.link, event.private_data, self._queue_pair.window_keys))
            case LinkState.CONNECTING, verbs.RDMA_CM_EVENT_REJECTED:
                raise rejected(event.private_data, where=self._device.where)
            case LinkState.UP, verbs.RDMA_CM_EVENT_ESTABLISHED:
                pass
            case _:
                raise _broken(f"{self._device.where}: while {self.state.value}: {event.words}")

    def _connect(self) -> None:
        """The receive buffers come first: a target may send as soon as it has accepted."""
        verbs, device, private_data = self._device.verbs, self._device, self._request.private_data
        if self._cmid.dev_name != device.context.name:
            raise _broken(f"{device.where} is reached through {self._cmid.dev_name} now, not {device.context.name}")
        queue_pair = self._queue_pair = VerbsQueuePair(device, self._request.depth, self._request.window_count)
        self._move(verbs.IBV_QPS_INIT)
        queue_pair.post_receives()
        parameters = verbs.ConnParam(
            resources=_ALL_READS,
            depth=0,  # the host reads nothing from the target (RDMA Figure 11, status 8)
            retry=_MAX_RETRIES,
            rnr_retry=_MAX_RETRIES,
            qp_num=queue_pair.number,
            data_len=len(private_data),  # without it pyverbs drops the data
        )
        parameters.set_private_data(private_data)
        self._cmid.connect(parameters)

    def _move(self, state: int) -> None:
        verbs = self._device.verbs
        assert self._queue_pair is not None
        attributes, mask = self._cmid.init_qp_attr(state)
        if state == verbs.IBV_QPS_INIT:
            # The connection manager does not know yet how many reads will be allowed, so leaves the right to read out:
            # targets could not fetch the data of writes.
            attributes.qp_access_flags = (
                verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_READ | verbs.IBV_ACCESS_REMOTE_WRITE
            )
        self._queue_pair.modify(attributes, mask)

    # ---- while it is up ------------------------------------------------------------------------------------------

    def _take_completions(self, max_count: int) -> None:
        assert self._queue_pair is not None
        completed = self._queue_pair.take_completions(max_count)
        if self.state is not LinkState.UP:
            return
        for item in completed:
            match item:
                case CompletedSend(command_id):
                    self._events.append(Sent(self.link, command_id))
                case CompletedReceive(data, key):
                    self._events.append(Received(self.link, data, key))
                case CompletedInvalidation(command_id):
                    self._events.append(KeyInvalidated(self.link, command_id))
                case FailedWork(status, vendor_error):
                    raise _broken(
                        f"{self._device.where}: a work request failed with status {status} (vendor error "
                        f"{vendor_error:#x}; ibv_poll_cq(3) lists them)"
                    )

    # ---- the end -------------------------------------------------------------------------------------------------

    def _try(self, action: Callable[[], None]) -> None:
        """Whatever fails breaks the link, of which the host hears once."""
        try:
            action()
        except self._device.verbs.PyverbsError as error:
            self._break(_broken(f"{self._device.where}: an RDMA call failed while {self.state.value}: {error}"))
        except MeshFusionError as error:
            self._break(error)

    def _break(self, error: MeshFusionError) -> None:
        if self.state not in (LinkState.BROKEN, LinkState.DRAINING, LinkState.DEAD):
            self.state = LinkState.BROKEN
            self._events.append(LinkBroken(self.link, error))

    def _destroy(self) -> None:
        """Dead is what is destroyed: :class:`LinkDead` is not told before, and destruction is tried until it is."""
        try:
            if self._queue_pair is not None:
                self._queue_pair.destroy()
        except self._device.verbs.PyverbsError:
            return
        self._queue_pair = None
        for thing in (self._cmid, self._channel):  # in this order
            if thing is not None:
                with suppress(self._device.verbs.PyverbsError):
                    thing.close()
        self._cmid = self._channel = None
        self.state = LinkState.DEAD
        self._events.append(LinkDead(self.link))


def _broken(message: str) -> MediaError:
    return MediaError(message, next_step="Nothing, if it reconnects; otherwise check network, RDMA device and target.")
