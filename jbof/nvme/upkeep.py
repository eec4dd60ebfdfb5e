"""What goes on by itself on a live admin queue: keep-alives, requests for events, and reading again what changed."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from meshfusion.jbof.nvme.async_events import AsyncEvent, EventKind, EventType, async_event
from meshfusion.jbof.nvme.completion import Completion
from meshfusion.jbof.nvme.identify import ControllerInfo
from meshfusion.jbof.nvme.inventory import Inventory, read_ana, read_error_log, read_inventory
from meshfusion.jbof.nvme.procedures import Procedure

EVENT_PAUSE_S: Final = 0.1
"""Before a request for events is sent again. Events wait at the target for it, and a storm of them is held down."""

REREAD_PAUSE_S: Final = 1.0
"""After a reading that failed, and between readings while an ANA state is changing."""


class KeepAlive:
    """Also the owner of its command. A deadline of one interval makes an unanswered one lose the queue."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.next_s = math.inf

    def start(self, now_s: float) -> None:
        self.next_s = now_s + self._interval_s

    def sending(self, now_s: float) -> float:
        """One is sent now; its deadline, which is when the next is due."""
        assert now_s >= self.next_s
        self.next_s = now_s + self._interval_s
        return self.next_s


class EventRequests:
    """Also the owner of their commands, which have no deadline: they are answered when something happens."""

    def __init__(self) -> None:
        self._due_s: list[float] = []

    @property
    def next_s(self) -> float:
        return min(self._due_s, default=math.inf)

    def arm(self, now_s: float, count: int) -> None:
        self._due_s = [now_s] * count

    def sending(self, now_s: float) -> int:
        """How many are sent now."""
        ripe_count = sum(now_s >= due_s for due_s in self._due_s)
        self._due_s = [due_s for due_s in self._due_s if now_s < due_s]
        return ripe_count

    def finished(self, now_s: float, completion: Completion) -> AsyncEvent | None:
        """The event that ended a request, which will be sent again; None if the target refused it."""
        if completion.status.is_success:
            self._due_s.append(now_s + EVENT_PAUSE_S)
            return async_event(completion.dword0)
        if not completion.status.dnr:
            self._due_s.append(now_s + REREAD_PAUSE_S)
        return None


class Wanted(NamedTuple):
    """What to read: everything about the namespaces, only how they are reached, the error log."""

    inventory: bool = False
    ana: bool = False
    errors: bool = False

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.inventory or other.inventory, self.ana or other.ana, self.errors or other.errors)


_WANTED_AFTER: Final = {
    EventKind.NAMESPACE_ATTRIBUTE_CHANGED: Wanted(inventory=True),
    EventKind.ANA_CHANGED: Wanted(ana=True),
}


class Rereading:
    """What is to be read again, and when. One reading at a time; what changes meanwhile is read after it."""

    def __init__(self) -> None:
        self._wanted = Wanted()
        self._not_before_s = -math.inf
        self._under_way: Wanted | None = None

    @property
    def next_s(self) -> float:
        return self._not_before_s if any(self._wanted) and self._under_way is None else math.inf

    def on_event(self, event: AsyncEvent) -> bool:
        """Was all that it means noted here?"""
        wanted = _WANTED_AFTER.get(event.kind) if event.kind is not None else None
        self._wanted |= wanted or Wanted(errors=event.type is EventType.ERROR)
        return wanted is not None

    def want_ana(self, not_before_s: float = -math.inf) -> None:
        self._wanted |= Wanted(ana=True)
        self._not_before_s = max(self._not_before_s, not_before_s)

    def begin(self, before: Inventory, controller: ControllerInfo, min_page_bytes: int) -> Procedure[Inventory]:
        assert self._under_way is None
        wanted, self._wanted = self._wanted, Wanted()
        self._under_way = wanted
        return _read(wanted, before, controller, min_page_bytes)

    def end(self, now_s: float, inventory: Inventory | None) -> None:
        """``inventory``: what was read; None if that failed."""
        assert self._under_way is not None
        if inventory is None:
            self._wanted |= self._under_way
            self._not_before_s = now_s + REREAD_PAUSE_S
        elif inventory.is_changing:  # the event that ends this may be lost, so look
            self.want_ana(now_s + REREAD_PAUSE_S)
        self._under_way = None


def _read(wanted: Wanted, before: Inventory, controller: ControllerInfo, min_page_bytes: int) -> Procedure[Inventory]:
    if wanted.errors:
        yield from read_error_log()
    if wanted.inventory:
        return (yield from read_inventory(controller, min_page_bytes))
    if wanted.ana and controller.reports_ana:
        return Inventory(before.namespaces, (yield from read_ana(controller, min_page_bytes)))
    return before
