"""How an association begins and ends (Base 3.5 and 3.6, chapter 6): procedures from Connect to the last queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.admin_commands import (
    IDENTIFY_BYTES,
    AsyncEvents,
    identify_controller,
    identify_nvm_limits,
    queue_counts,
    set_async_events,
    set_queue_count,
)
from meshfusion.jbof.nvme.auth import Authentication, authenticate
from meshfusion.jbof.nvme.auth_keys import RandomBytes
from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.fabrics import (
    ANY_CONTROLLER,
    CONNECT_DATA_BYTES,
    ConnectResult,
    connect,
    connect_data,
    connect_result,
    property_get,
    property_set,
)
from meshfusion.jbof.nvme.fields import protocol_error
from meshfusion.jbof.nvme.identify import ControllerInfo, NvmLimits, parse_controller, parse_nvm_limits
from meshfusion.jbof.nvme.inventory import Inventory, read_inventory
from meshfusion.jbof.nvme.io_commands import (
    RECLAIM_UNIT_HANDLES_BYTES,
    parse_placement_ids,
    reclaim_unit_handles,
)
from meshfusion.jbof.nvme.procedures import ArmEvents, Ask, Open, Pause, Procedure, StartKeepAlive
from meshfusion.jbof.nvme.properties import (
    CAP,
    CC,
    CSTS,
    Capabilities,
    Configuration,
    ControllerStatus,
    Property,
    Shutdown,
    ShutdownStatus,
    decode_cap,
    decode_csts,
    encode_cc,
)
from meshfusion.jbof.nvme.rdma_cm import MIN_QUEUE_DEPTH
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.sgl import DataPointer
from meshfusion.jbof.nvme.status import NvmeCommandError

MAX_EVENT_REQUESTS: Final = 3  # more are of no use, and some targets take no more
MIN_READY_TIMEOUT_S: Final = 1.0  # for controllers whose CAP.TO is 0, which means at once
POLL_INTERVAL_S: Final = 0.02

_DISCOVERY_CONTROLLER: Final = 2  # CNTRLTYPE (Base Figure 313)
_ADMINISTRATIVE_CONTROLLER: Final = 3
_WANTED_EVENTS: Final = AsyncEvents.NAMESPACE_ATTRIBUTE | AsyncEvents.ASYMMETRIC_NAMESPACE_ACCESS


@dataclass(frozen=True, slots=True)
class AssociationInfo:
    """What came out of the bring-up. ``limits``: None for a controller that does not tell them (CNS 06h).
    ``placement_ids``: by namespace, of those with Flexible Data Placement."""

    controller_id: int
    capabilities: Capabilities
    controller: ControllerInfo
    limits: NvmLimits | None
    io_queue_count: int
    io_queue_depth: int
    inventory: Inventory
    authentication: Authentication
    placement_ids: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def data_placement(self, nsid: int) -> int | None:
        """What writes of chunks name, so that they share no reclaim unit with labels, headers and summaries, which name
        none and go to the first handle; None where there are not two. (:func:`~meshfusion.jbof.wear.placement
        .placement_handle`, of one lifetime class.)"""
        ids = self.placement_ids.get(nsid, ())
        return ids[1] if len(ids) > 1 else None

    @property
    def max_transfer_bytes(self) -> int | None:
        return self.controller.max_transfer_bytes(self.capabilities)


def bring_up(settings: ControllerSettings, random_bytes: RandomBytes) -> Procedure[AssociationInfo]:
    """From nothing to queues for I/O. ``random_bytes``: for authentication."""
    yield Open(0, settings.admin_queue_depth)
    connected = yield from _connect(settings, 0, settings.admin_queue_depth)
    authentication = yield from authenticate(settings, 0, connected, random_bytes)
    capabilities = yield from _enable(settings)
    yield StartKeepAlive()
    controller = yield from _identify(settings, connected.controller_id)
    # Before the first look at the namespaces: whatever changes after that look is then announced.
    yield from _ask_for_events(controller)
    inventory = yield from read_inventory(controller, capabilities.min_page_bytes)
    limits = yield from _read_limits()
    count = yield from _negotiate_queue_count(settings.io_queue_count)
    depth = min(settings.io_queue_depth, capabilities.max_queue_depth, controller.maxcmd or settings.io_queue_depth)
    depth = max(depth, MIN_QUEUE_DEPTH)
    for queue_id in range(1, count + 1):
        yield Open(queue_id, depth, connected.controller_id)
        queue = yield from _connect(settings, queue_id, depth, connected.controller_id)
        yield from authenticate(settings, queue_id, queue, random_bytes)
    placement_ids = yield from _read_placement_ids(controller, inventory)
    return AssociationInfo(
        connected.controller_id,
        capabilities,
        controller,
        limits,
        count,
        depth,
        inventory,
        authentication,
        MappingProxyType(placement_ids),
    )


def shut_down(capabilities: Capabilities, timeout_s: float) -> Procedure[bool]:
    """Tell the controller that it will be left, and wait until it is ready for that (Base 3.6.1). True: it was."""
    answer = yield _set(CC, encode_cc(replace(_enabled(capabilities), shutdown=Shutdown.NORMAL)))
    end_s = answer.now_s + timeout_s
    while answer.now_s < end_s:
        answer = yield _get(CSTS)
        if _status(answer.result).shutdown is ShutdownStatus.COMPLETE:
            return True
        answer = yield Pause(POLL_INTERVAL_S)
    return False


def _connect(
    settings: ControllerSettings, queue_id: int, depth: int, controller_id: int = ANY_CONTROLLER
) -> Procedure[ConnectResult]:
    def build(data: DataPointer) -> Command:
        timeout_ms = 0 if queue_id else round(settings.keep_alive_timeout_s * 1000)
        return connect(queue_id, depth, data, keep_alive_timeout_ms=timeout_ms)

    outgoing = connect_data(settings.host_id, settings.host_nqn, settings.subsystem_nqn, controller_id=controller_id)
    answer = yield Ask(build, CONNECT_DATA_BYTES, outgoing, queue_id)
    return connect_result(answer.result & 0xFFFFFFFF, answer.sq_head)


def _enable(settings: ControllerSettings) -> Procedure[Capabilities]:
    capabilities = decode_cap((yield _get(CAP)).result)
    if not capabilities.supports_nvm:
        raise UnsupportedError(
            f"{settings.where}: the controller has no NVM command set (CAP.CSS {capabilities.css:#x})",
            next_step="Connect to a subsystem with ordinary namespaces.",
        )
    answer = yield _set(CC, encode_cc(_enabled(capabilities)))
    timeout_s = max(capabilities.ready_timeout_s, MIN_READY_TIMEOUT_S)
    end_s = answer.now_s + timeout_s
    while True:
        answer = yield _get(CSTS)
        status = _status(answer.result)
        if status.cfs:
            raise MediaError(
                f"{settings.where}: the controller reports a fatal error (CSTS.CFS) instead of becoming ready",
                next_step="Look at the target's log for the cause.",
            )
        if status.rdy:
            return capabilities
        if answer.now_s >= end_s:
            raise MediaError(
                f"{settings.where}: the controller was not ready (CSTS.RDY) {timeout_s:g} s after it was enabled",
                next_step="Look at the target's log for the cause.",
            )
        yield Pause(POLL_INTERVAL_S)


def _identify(settings: ControllerSettings, controller_id: int) -> Procedure[ControllerInfo]:
    controller = parse_controller((yield Ask(identify_controller, IDENTIFY_BYTES)).data)
    if controller.cntlid != controller_id:
        raise protocol_error(
            f"{settings.where}: Connect returned controller {controller_id}, Identify {controller.cntlid}"
        )
    problem = None
    if not controller.has_keyed_sgls:
        problem = f"takes no keyed SGLs (SGLS {controller.sgls:#x})"
    elif controller.cntrltype in (_DISCOVERY_CONTROLLER, _ADMINISTRATIVE_CONTROLLER):
        problem = f"is not for I/O (CNTRLTYPE {controller.cntrltype})"
    elif controller.keep_alive_unit_ms == 0:
        problem = "has no keep-alive (KAS 0), which NVMe/RDMA needs"
    if problem is not None:
        raise UnsupportedError(
            f"{settings.where}: the controller {problem}", next_step="Connect to an I/O subsystem of another target."
        )
    return controller


def _ask_for_events(controller: ControllerInfo) -> Procedure[None]:
    events = _WANTED_EVENTS & AsyncEvents(controller.oaes & _WANTED_EVENTS)
    yield Ask(lambda _: set_async_events(events))
    yield ArmEvents(min(MAX_EVENT_REQUESTS, controller.max_async_event_requests))


def _read_limits() -> Procedure[NvmLimits | None]:
    try:
        answer = yield Ask(identify_nvm_limits, IDENTIFY_BYTES)
    except NvmeCommandError:
        return None  # CNS 06h is optional
    return parse_nvm_limits(answer.data)


def _read_placement_ids(controller: ControllerInfo, inventory: Inventory) -> Procedure[dict[int, tuple[int, ...]]]:
    """An I/O command asks for them: when there are queues for I/O."""
    found: dict[int, tuple[int, ...]] = {}
    if not controller.has_data_placement:
        return found
    for nsid in inventory.namespaces:
        build = partial(reclaim_unit_handles, nsid)
        try:
            answer = yield Ask(build, RECLAIM_UNIT_HANDLES_BYTES, queue_id=1)
        except NvmeCommandError:
            continue  # it is not enabled there, or the namespace is reached through another controller
        found[nsid] = parse_placement_ids(answer.data)
    return found


def _negotiate_queue_count(wanted: int) -> Procedure[int]:
    granted = queue_counts((yield Ask(lambda _: set_queue_count(wanted))).result & 0xFFFFFFFF).pairs
    return min(wanted, granted)


def _enabled(capabilities: Capabilities) -> Configuration:
    return Configuration(enable=True, mps=capabilities.mpsmin)


def _get(where: Property) -> Ask:
    return Ask(lambda _: property_get(*where))


def _set(where: Property, value: int) -> Ask:
    return Ask(lambda _: property_set(*where, value))


def _status(result: int) -> ControllerStatus:
    return decode_csts(result & 0xFFFFFFFF)
