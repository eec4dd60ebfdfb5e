"""One association of host and controller, from the first queue pair that is opened to the last that is dead.

Losing any queue pair loses the association: it cannot be told how much of it the target still keeps. There is no way
back from there; :class:`~meshfusion.jbof.nvme.controller.Controller` begins another.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.admin_commands import async_event_request, keep_alive
from meshfusion.jbof.nvme.auth_keys import RandomBytes
from meshfusion.jbof.nvme.bring_up import AssociationInfo, bring_up, shut_down
from meshfusion.jbof.nvme.command import AdminOpcode, Command
from meshfusion.jbof.nvme.controller_effects import (
    AssociationDead,
    AssociationEffect,
    AssociationLost,
    AssociationUp,
    DeathOverdue,
    InventoryChanged,
    RequestEnded,
    TargetEvent,
)
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.procedures import (
    ArmEvents,
    AskUnderWay,
    Conversation,
    Conversations,
    Ended,
    Open,
    Procedure,
    StartKeepAlive,
)
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import (
    CommandEffect,
    Finished,
    InDoubt,
    MemoryFree,
    NotSent,
    QueueDead,
    QueueEffect,
    QueueFullError,
    QueueLost,
    QueueUp,
    SubmissionEffect,
)
from meshfusion.jbof.nvme.rdma_cm import encode_request
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.status import NvmeCommandError
from meshfusion.jbof.nvme.transport import LinkEvent, ScratchPool, TransportEffect
from meshfusion.jbof.nvme.upkeep import EventRequests, KeepAlive, Rereading

Effects = list[AssociationEffect]
MAX_CONVERSATIONS: Final = 6  # and two more of its own; the pool of scratch memory must have a piece for each


class Phase(enum.IntEnum):
    """They follow each other; any may be left out but the last two."""

    COMING_UP = 0
    LIVE = 1
    SHUTTING_DOWN = 2
    DYING = 3
    DEAD = 4


class Association:
    """``links``: numbers for connections, none of them used before. ``random_bytes``: for authentication."""

    def __init__(
        self, settings: ControllerSettings, scratch_pool: ScratchPool, links: Iterator[int], random_bytes: RandomBytes
    ) -> None:
        self.phase = Phase.COMING_UP
        self.info: AssociationInfo | None = None
        self.inventory = Inventory()
        self.io_queues: list[QueuePair] = []
        self._settings = settings
        self._links = links
        self._random_bytes = random_bytes
        self._queues: dict[int, QueuePair] = {}  # by link, until they are dead
        self._by_id: list[QueuePair] = []
        self._opening: Conversation | None = None
        self._conversations = Conversations(self, scratch_pool, where=settings.where)
        self._keep_alive = KeepAlive(settings.keep_alive_interval_s)
        self._event_requests = EventRequests()
        self._rereading = Rereading()
        self._death_asked_s: dict[int, float] = {}  # by link, until it is confirmed or reported as overdue
        self._drain_end_s = math.inf
        self._is_orderly = False

    @property
    def next_deadline_s(self) -> float:
        """When :meth:`tick` has something to do; infinite if never."""
        times = [queue.next_deadline_s for queue in self._queues.values()]
        times += [asked_s + self._settings.kill_alarm_s for asked_s in self._death_asked_s.values()]
        times += [self._conversations.next_deadline_s, self._drain_end_s]
        if self.phase < Phase.DYING:
            times += [self._keep_alive.next_s, self._event_requests.next_s]
        if self.phase is Phase.LIVE:
            times.append(self._rereading.next_s)
        return min(times)

    # ---- asking --------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> Effects:
        """Ends with :class:`AssociationUp` or :class:`AssociationLost`."""
        return self._conversations.begin(now_s, bring_up(self._settings, self._random_bytes), self._brought_up)

    def submit_io(
        self, now_s: float, queue: QueuePair, owner: object, command: Command, deadline_s: float
    ) -> list[SubmissionEffect]:
        assert self.phase is Phase.LIVE
        # It can neither finish a command nor lose the queue, so none of its effects concerns the association.
        return queue.submit(now_s, owner, command, deadline_s)

    def request(self, now_s: float, owner: object, procedure: Procedure[Any]) -> Effects:
        assert self.phase is Phase.LIVE
        if self._conversations.count >= MAX_CONVERSATIONS:
            error = QueueFullError(f"{self._settings.where}: too many requests at a time", next_step="Ask again later.")
            return [RequestEnded(owner, None, error)]
        return self._conversations.begin(now_s, procedure, lambda _, end: [RequestEnded(owner, end.result, end.error)])

    def path_failed(self) -> None:
        if self.info is not None and self.info.controller.reports_ana:
            self._rereading.want_ana()

    def shut_down(self, now_s: float) -> Effects:
        """Let commands for namespaces end, shut the controller down, and die."""
        assert self.phase is Phase.LIVE
        self.phase = Phase.SHUTTING_DOWN
        self._drain_end_s = now_s + self._settings.shutdown_timeout_s
        return self._go_on_shutting_down(now_s)

    def kill(self, now_s: float, error: MeshFusionError) -> Effects:
        """Die because of ``error``; nothing happens if that has begun already."""
        if self.phase >= Phase.DYING:
            return []
        self.phase = Phase.DYING
        self._drain_end_s = math.inf
        ends, error = self._conversations.abandon(now_s, error)
        effects: Effects = [AssociationLost(error)]
        for queue in list(self._queues.values()):
            effects += self._absorb(now_s, queue.kill(error))
        return effects + ends + self._all_dead()

    # ---- events --------------------------------------------------------------------------------------------------

    def handle(self, now_s: float, event: LinkEvent) -> Effects:
        effects = self._absorb(now_s, self._queues[event.link].handle(now_s, event))
        return effects + self._go_on_shutting_down(now_s) if self.phase is Phase.SHUTTING_DOWN else effects

    def tick(self, now_s: float) -> Effects:
        effects: Effects = []
        for queue in list(self._queues.values()):
            effects += self._absorb(now_s, queue.tick(now_s))
        effects += self._conversations.tick(now_s)
        effects += self._keep_up(now_s)
        if self.phase is Phase.SHUTTING_DOWN:
            effects += self._go_on_shutting_down(now_s)
        for link, asked_s in list(self._death_asked_s.items()):
            if now_s >= asked_s + self._settings.kill_alarm_s:
                del self._death_asked_s[link]
                effects.append(DeathOverdue(link, asked_s))
        return effects

    def _absorb(self, now_s: float, effects: Sequence[QueueEffect]) -> Effects:
        """Act on what concerns the association; the rest is for its owner.

        What goes to the transport comes first: acting on the others may kill the very link that it is for.
        """
        if not effects:
            return []
        kept: Effects = [effect for effect in effects if isinstance(effect, TransportEffect)]
        for effect in effects:
            match effect:
                case Finished(owner, _) | NotSent(owner, _) | InDoubt(owner, _) | MemoryFree(owner):
                    kept += self._absorb_command(now_s, effect, owner)
                case QueueUp():
                    assert self._opening is not None
                    kept += self._conversations.opened(now_s, self._opening)
                case QueueLost(link, error):
                    self._death_asked_s[link] = now_s
                    kept += self.kill(now_s, error)
                case QueueDead(link):
                    del self._queues[link]
                    self._death_asked_s.pop(link, None)
                    kept += self._all_dead()
        return kept

    def _absorb_command(self, now_s: float, effect: CommandEffect, owner: object) -> Effects:
        if isinstance(owner, AskUnderWay):
            return self._conversations.handle(now_s, effect, owner)
        if owner is self._keep_alive:
            return self._on_keep_alive(now_s, effect)
        if owner is self._event_requests:
            return self._on_event(now_s, effect)
        return [effect]

    def _on_keep_alive(self, now_s: float, effect: CommandEffect) -> Effects:
        if isinstance(effect, Finished) and not effect.completion.status.is_success:
            status = effect.completion.status
            return self.kill(now_s, NvmeCommandError(status, AdminOpcode.KEEP_ALIVE, where=self._settings.where))
        return []  # answered; or the queue is lost, which is told of besides

    def _on_event(self, now_s: float, effect: CommandEffect) -> Effects:
        if not isinstance(effect, Finished):
            return []
        event = self._event_requests.finished(now_s, effect.completion)
        return [] if event is None or self._rereading.on_event(event) else [TargetEvent(event)]

    # ---- what goes on by itself ----------------------------------------------------------------------------------

    def _keep_up(self, now_s: float) -> Effects:
        effects: Effects = []
        if self.phase < Phase.DYING and now_s >= self._keep_alive.next_s:
            deadline_s = self._keep_alive.sending(now_s)
            effects += self._on_admin_queue(now_s, self._keep_alive, keep_alive(), deadline_s)
        if self.phase < Phase.DYING:
            for _ in range(self._event_requests.sending(now_s)):
                effects += self._on_admin_queue(now_s, self._event_requests, async_event_request(), math.inf)
        if self.phase is Phase.LIVE and now_s >= self._rereading.next_s:
            assert self.info is not None
            procedure = self._rereading.begin(
                self.inventory, self.info.controller, self.info.capabilities.min_page_bytes
            )
            effects += self._conversations.begin(now_s, procedure, self._reread)
        return effects

    def _on_admin_queue(self, now_s: float, owner: object, command: Command, deadline_s: float) -> Effects:
        return self._absorb(now_s, self._by_id[0].submit(now_s, owner, command, deadline_s))

    def _reread(self, now_s: float, ended: Ended) -> Effects:
        self._rereading.end(now_s, ended.result)
        if ended.error is not None:  # a status may pass; anything else means that target and host do not agree
            return [] if isinstance(ended.error, NvmeCommandError) else self.kill(now_s, ended.error)
        before, self.inventory = self.inventory, ended.result
        changed = self.inventory.differences(before)
        return [InventoryChanged(changed, self.inventory)] if changed else []

    # ---- for its procedures --------------------------------------------------------------------------------------

    def send(self, now_s: float, queue_id: int, owner: AskUnderWay, command: Command) -> Effects:
        deadline_s = now_s + self._settings.admin_timeout_s
        return self._absorb(now_s, self._by_id[queue_id].submit(now_s, owner, command, deadline_s))

    def perform(self, now_s: float, step: Open | StartKeepAlive | ArmEvents, conversation: Conversation) -> Effects:
        match step:
            case StartKeepAlive():
                self._keep_alive.start(now_s)
            case ArmEvents(how_many):
                self._event_requests.arm(now_s, how_many)
            case Open(queue_id, depth, controller_id):
                assert queue_id == len(self._by_id)
                link = next(self._links)
                where = f"{self._settings.where}, queue {queue_id}"
                # Admin commands have scratch memory of ours, which no window needs to guard.
                key_scope = self._settings.key_scope if queue_id else KeyScope.REGION
                max_waiting = self._settings.max_waiting_commands
                queue = QueuePair(link, depth, max_waiting=max_waiting, where=where, key_scope=key_scope)
                self._queues[link] = queue
                self._by_id.append(queue)
                self._opening = conversation
                private_data = encode_request(queue_id, depth, controller_id)
                return self._absorb(now_s, queue.open(private_data, now_s + self._settings.connect_timeout_s))
        return []

    # ---- the phases ----------------------------------------------------------------------------------------------

    def _brought_up(self, now_s: float, ended: Ended) -> Effects:
        if ended.error is not None:
            return self.kill(now_s, ended.error)
        assert self.phase is Phase.COMING_UP
        info: AssociationInfo = ended.result
        self.phase, self.info, self.inventory = Phase.LIVE, info, info.inventory
        self.io_queues = self._by_id[1:]
        return [AssociationUp(info)]

    def _go_on_shutting_down(self, now_s: float) -> Effects:
        is_idle = not any(queue.load for queue in self.io_queues)
        if self._drain_end_s == math.inf or not (is_idle or now_s >= self._drain_end_s):
            return []
        self._drain_end_s = math.inf
        assert self.info is not None

        def shut_down_ended(now_s: float, ended: Ended) -> Effects:
            self._is_orderly = is_idle and ended.result is True
            return self.kill(now_s, _left(self._settings.where))

        procedure = shut_down(self.info.capabilities, self._settings.shutdown_timeout_s)
        return self._conversations.begin(now_s, procedure, shut_down_ended)

    def _all_dead(self) -> Effects:
        if self.phase is not Phase.DYING or self._queues:
            return []
        self.phase = Phase.DEAD
        return [AssociationDead(self._is_orderly)]


def _left(where: str) -> MediaError:
    return MediaError(f"{where} is disconnected", next_step="Connect again.")
