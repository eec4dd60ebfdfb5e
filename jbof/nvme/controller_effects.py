"""The states of a controller's life and the events that its owner hears of, as values."""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.async_events import AsyncEvent
from meshfusion.jbof.nvme.bring_up import AssociationInfo
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.queue_effects import CommandEffect
from meshfusion.jbof.nvme.transport import TransportEffect


class ControllerState(enum.Enum):
    IDLE = "idle"  # nothing was asked for yet
    CONNECTING = "connecting"
    LIVE = "live"
    LOSING = "losing"  # queue pairs are being killed; then it is tried again, or given up
    WAITING = "waiting"  # for the next attempt to connect
    SHUTTING_DOWN = "shutting_down"  # commands under way may end, then the controller shuts down
    CLOSING = "closing"  # queue pairs are being killed, for good
    LOST = "lost"  # given up
    CLOSED = "closed"


_S = ControllerState
NEXT_STATES: Final = {
    _S.IDLE: {_S.CONNECTING, _S.CLOSED},
    _S.CONNECTING: {_S.LIVE, _S.LOSING, _S.CLOSING},
    _S.LIVE: {_S.LOSING, _S.SHUTTING_DOWN, _S.CLOSING},
    _S.LOSING: {_S.WAITING, _S.LOST, _S.CLOSING},
    _S.WAITING: {_S.CONNECTING, _S.LOST, _S.CLOSED},
    _S.SHUTTING_DOWN: {_S.CLOSING},
    _S.CLOSING: {_S.CLOSED},
    _S.LOST: {_S.CLOSED},
    _S.CLOSED: set[_S](),
}
assert NEXT_STATES.keys() == set(ControllerState)


class Connected(NamedTuple):
    """Commands for namespaces are taken."""

    info: AssociationInfo


class ConnectionLost(NamedTuple):
    """It was live. Everything under way is in doubt; reconnection begins when all queue pairs are dead."""

    error: MeshFusionError


class RetryScheduled(NamedTuple):
    """Nothing of the last association or attempt is left, which ended with ``error``; the next is at ``retry_s``."""

    error: MeshFusionError
    retry_s: float


class ControllerLost(NamedTuple):
    """Given up: the first attempt failed, the time for reconnecting is over, or it cannot ever succeed."""

    error: MeshFusionError


class Disconnected(NamedTuple):
    """As asked for. ``orderly``: every command had ended and the controller said that it was ready to be left."""

    orderly: bool


class InventoryChanged(NamedTuple):
    """Namespaces ``nsids`` came, went or are different now, or are reached in another way."""

    nsids: frozenset[int]
    inventory: Inventory


class TargetEvent(NamedTuple):
    """Any other asynchronous event, for the log."""

    event: AsyncEvent


class DeathOverdue(NamedTuple):
    """The transport does not confirm the death of a queue pair: its commands' memory stays taken."""

    link: int
    asked_s: float


class RequestEnded(NamedTuple):
    """Of a procedure that the owner asked for. ``result`` is what it returned unless there is an ``error``."""

    owner: object
    result: Any
    error: MeshFusionError | None


class AssociationUp(NamedTuple):
    info: AssociationInfo


class AssociationLost(NamedTuple):
    """Its queue pairs are being killed because of ``error``."""

    error: MeshFusionError


class AssociationDead(NamedTuple):
    """No queue pair is left. ``orderly``: see :class:`Disconnected`."""

    orderly: bool


UpkeepEvent = InventoryChanged | TargetEvent | DeathOverdue | RequestEnded
ControllerEvent = Connected | ConnectionLost | RetryScheduled | ControllerLost | Disconnected | UpkeepEvent
AssociationEffect = TransportEffect | CommandEffect | UpkeepEvent | AssociationUp | AssociationLost | AssociationDead
ControllerEffect = TransportEffect | CommandEffect | ControllerEvent
