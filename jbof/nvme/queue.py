"""One queue pair: commands out, completions in, and the truth about what became of each command. No I/O, no clock.

Every command that is submitted ends for its owner in exactly one of three ways:

- :class:`Finished`: its completion is here; nobody touches its memory any more;
- :class:`NotSent`: it was never posted; nobody touched its memory;
- :class:`InDoubt`: its fate is unknown, because its deadline passed or the queue was lost. Its memory may still be
  read or written by the target. The queue asks for its own death, and when the transport confirms that the queue pair
  is gone, :class:`MemoryFree` gives the memory back. What becomes of the command *at the target* stays unknown: a
  write may still reach the medium (rule 3 of the design).

A command is finished only when its response has come **and** its send has completed, for until then the NIC may read
its capsule again to resend it; a response that came with the invalidation of the command's key counts as both.

A command whose memory is given through a window is finished only when its key is dead, too: the target invalidated it
with its response, or else it is invalidated here. A target that invalidates any other key cannot be trusted.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.command import FILLS_MEMORY, MAX_COMMAND_ID, Command, capsule
from meshfusion.jbof.nvme.completion import decode_completion
from meshfusion.jbof.nvme.fields import NvmeProtocolError, protocol_error
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.queue_commands import PostedCommand, WaitingCommand
from meshfusion.jbof.nvme.queue_effects import (
    CommandDeadlineError,
    Finished,
    InDoubt,
    MemoryFree,
    NotSent,
    QueueDead,
    QueueEffect,
    QueueFullError,
    QueueLost,
    QueueLostError,
    QueueState,
    QueueUp,
    SubmissionEffect,
)
from meshfusion.jbof.nvme.rdma_cm import decode_accept
from meshfusion.jbof.nvme.transport import (
    Bind,
    InvalidateKey,
    KeyInvalidated,
    KillLink,
    LinkBroken,
    LinkDead,
    LinkEvent,
    LinkUp,
    OpenLink,
    PostCapsule,
    Received,
    Sent,
)
from meshfusion.jbof.nvme.windows import KeyWindows


class QueuePair:
    """``link``: the number of its connection. ``depth``: entries, so that ``depth - 1`` commands fit (Base 3.3.2.1).

    ``max_waiting`` bounds the line of commands for which there is no room yet. ``where`` names target and queue in
    errors. ``handle`` and ``tick`` are to be called with times that do not go back. Commands may want windows where
    ``key_scope`` is the command: there is one for each that fits.
    """

    def __init__(
        self, link: int, depth: int, *, max_waiting: int, where: str, key_scope: KeyScope = KeyScope.REGION
    ) -> None:
        assert depth >= 2
        self.link = link
        self.state = QueueState.NEW
        self._depth = depth
        self._limit = depth - 1
        self._max_waiting = max_waiting
        self._where = where
        self._window_count = self._limit if key_scope is KeyScope.COMMAND else 0
        self._windows = KeyWindows(())
        self._posted: dict[int, PostedCommand] = {}
        self._waiting: deque[WaitingCommand] = deque()
        self._doubtful: list[object] = []
        self._deadlines: list[tuple[float, int, PostedCommand]] = []
        self._next_id = 0
        self._submitted = 0
        self._connect_deadline_s = math.inf

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Commands posted or waiting."""
        return len(self._posted) + len(self._waiting)

    @property
    def room(self) -> int:
        """How many more commands would be posted at once."""
        if self.state is not QueueState.LIVE:
            return 0
        return max(0, self._limit - len(self._posted) - len(self._waiting))

    @property
    def next_deadline_s(self) -> float:
        """When :meth:`tick` has something to do; infinite if never."""
        if self.state is QueueState.CONNECTING:
            return self._connect_deadline_s
        while self._deadlines and self._deadlines[0][2].is_over:
            heapq.heappop(self._deadlines)
        posted = self._deadlines[0][0] if self._deadlines else math.inf
        return min([posted, *(item.deadline_s for item in self._waiting)]) if self._waiting else posted

    # ---- acting --------------------------------------------------------------------------------------------------

    def open(self, private_data: bytes, deadline_s: float) -> list[QueueEffect]:
        assert self.state is QueueState.NEW, self.state
        self.state = QueueState.CONNECTING
        self._connect_deadline_s = deadline_s
        return [OpenLink(self.link, self._depth, private_data, deadline_s, self._window_count)]

    def submit(self, now_s: float, owner: object, command: Command, deadline_s: float) -> list[SubmissionEffect]:
        """Post ``command``, or let it wait for room."""
        if self.state is not QueueState.LIVE:
            return [NotSent(owner, self._lost("is not connected"))]
        if now_s >= deadline_s:
            return [NotSent(owner, self._late("before it was sent"))]
        if len(self._posted) < self._limit and not self._waiting:
            return [self._post(WaitingCommand(owner, command, deadline_s))]
        if len(self._waiting) >= self._max_waiting:
            error = QueueFullError(
                f"{self._where}: {len(self._waiting)} commands wait for room in the queue pair already",
                next_step="Use more or deeper queues, or less at a time.",
            )
            return [NotSent(owner, error)]
        self._waiting.append(WaitingCommand(owner, command, deadline_s))
        return []

    def handle(self, now_s: float, event: LinkEvent) -> list[QueueEffect]:
        """What happened on the link. Deadlines come first: a response that is here too late is no success."""
        assert event.link == self.link
        if type(event) is LinkDead:
            return self._on_dead()
        effects = self.tick(now_s)
        match self.state, event:
            case QueueState.LIVE, Sent():
                effects += self._on_sent(event)
            case QueueState.LIVE, Received():
                effects += self._on_received(event)
            case QueueState.LIVE, KeyInvalidated():
                effects += self._on_invalidated(event)
            case QueueState.CONNECTING, LinkUp():
                effects += self._on_up(event)
            case QueueState.CONNECTING | QueueState.LIVE, LinkBroken():
                effects += self.kill(event.error)
            case QueueState.DYING, _:
                pass  # late: what it is about was given up
            case _:
                raise AssertionError(f"{event} for a queue pair that is {self.state}")
        return effects

    def tick(self, now_s: float) -> list[QueueEffect]:
        """Give up what is late at ``now_s``."""
        if now_s < self.next_deadline_s:
            return []
        if self.state is QueueState.CONNECTING:
            return self.kill(self._late("while its connection was made"))
        if self.state is not QueueState.LIVE:
            return []
        effects: list[QueueEffect] = []
        for item in [item for item in self._waiting if now_s >= item.deadline_s]:
            self._waiting.remove(item)
            effects.append(NotSent(item.owner, self._late("before it was sent")))
        if now_s >= self.next_deadline_s:
            effects += self.kill(self._late("and its fate is unknown; the queue pair is given up"))
        return effects

    def kill(self, error: MeshFusionError) -> list[QueueEffect]:
        """End the queue pair because of ``error``. Nothing happens if that has begun already."""
        if self.state in (QueueState.DYING, QueueState.DEAD):
            return []
        assert self.state is not QueueState.NEW
        self.state = QueueState.DYING
        effects: list[QueueEffect] = [QueueLost(self.link, error), KillLink(self.link)]
        effects += [NotSent(item.owner, error) for item in self._waiting]
        for posted in self._posted.values():
            if not posted.reported:
                posted.reported = True
                self._doubtful.append(posted.owner)
                effects.append(InDoubt(posted.owner, error))
        self._waiting.clear()
        self._posted.clear()
        self._deadlines.clear()
        return effects

    # ---- events --------------------------------------------------------------------------------------------------

    def _on_up(self, event: LinkUp) -> list[QueueEffect]:
        try:
            target_entries = decode_accept(event.private_data)
        except NvmeProtocolError as error:
            return self.kill(error)
        assert len(event.window_keys) == self._window_count, "a transport without windows"
        self._windows = KeyWindows(event.window_keys)
        self._limit = min(self._limit, target_entries)
        self.state = QueueState.LIVE
        return [QueueUp(self.link)]

    def _on_sent(self, event: Sent) -> list[QueueEffect]:
        posted = self._posted.get(event.command_id)
        assert posted is not None, f"{event} for a command that is not under way"
        assert not posted.sent, f"{event} twice"
        posted.sent = True
        return self._settle(event.command_id, posted)

    def _on_received(self, event: Received) -> list[QueueEffect]:
        # The phase tag and SQID are reserved over Fabrics (Base Figure 97): targets set them as they like.
        try:
            completion = decode_completion(event.data)
            posted = self._posted.get(completion.command_id)
            if posted is None:
                raise protocol_error(
                    f"{self._where}: a response to command {completion.command_id}, which was not sent"
                )
            if posted.completion is not None:
                raise protocol_error(f"{self._where}: a second response to command {completion.command_id}")
            key = posted.bind.key if posted.bind is not None else None
            if event.invalidated_key not in (None, key):
                raise protocol_error(
                    f"{self._where}: the response to command {completion.command_id} invalidated the key of another"
                )
        except NvmeProtocolError as error:
            return self.kill(error)  # one of the commands under way may be meant: none can be trusted any more
        posted.completion = completion
        posted.is_key_dead = event.invalidated_key is not None
        if key is not None and not posted.is_key_dead:
            return [InvalidateKey(self.link, completion.command_id, key)]
        effects = self._settle(completion.command_id, posted)
        if posted.is_key_dead and not posted.reported:
            effects.append(self._finish(posted))
        return effects

    def _on_invalidated(self, event: KeyInvalidated) -> list[QueueEffect]:
        posted = self._posted.get(event.command_id)
        assert posted is not None, f"{event} for a command that is not under way"
        assert posted.completion is not None, f"{event} was not asked for"
        assert not posted.is_key_dead, f"{event} twice"
        posted.is_key_dead = True
        return self._settle(event.command_id, posted)

    def _on_dead(self) -> list[QueueEffect]:
        assert self.state is QueueState.DYING, f"death was not asked for in state {self.state}"
        assert not self._posted
        self.state = QueueState.DEAD
        owners, self._doubtful = self._doubtful, []
        return [*(MemoryFree(owner) for owner in owners), QueueDead(self.link)]

    # ---- commands ------------------------------------------------------------------------------------------------

    def _post(self, item: WaitingCommand) -> PostCapsule:
        assert self.state is QueueState.LIVE
        assert len(self._posted) < self._limit
        # Identifiers go round, so that one comes back as late as possible: a target's stray second response then
        # meets an identifier that is not in use.
        while self._next_id in self._posted:
            self._next_id = (self._next_id + 1) % (MAX_COMMAND_ID + 1)
        command_id, self._next_id = self._next_id, (self._next_id + 1) % (MAX_COMMAND_ID + 1)
        bind = self._bind(item.command)
        posted = self._posted[command_id] = PostedCommand(item.owner, item.deadline_s, bind)
        self._submitted += 1
        if item.deadline_s != math.inf:
            heapq.heappush(self._deadlines, (item.deadline_s, self._submitted, posted))
        key = bind.key if bind is not None else None
        return PostCapsule(self.link, command_id, capsule(item.command, command_id, key), bind)

    def _bind(self, command: Command) -> Bind | None:
        """There is a free window, for a command keeps its place in the queue until the key of its window is dead."""
        if command.window is None:
            return None
        return self._windows.bind(command.window, is_written=command.opcode in FILLS_MEMORY)

    def _settle(self, command_id: int, posted: PostedCommand) -> list[QueueEffect]:
        """If all is here: the identifier, its place in the queue and its window are free again."""
        if not posted.is_over:
            return []
        del self._posted[command_id]
        if posted.bind is not None:
            self._windows.give_back(posted.bind)
        effects: list[QueueEffect] = [] if posted.reported else [self._finish(posted)]
        while self._waiting and len(self._posted) < self._limit:
            effects.append(self._post(self._waiting.popleft()))
        return effects

    def _finish(self, posted: PostedCommand) -> Finished:
        assert self.state is QueueState.LIVE
        assert not posted.reported, "a command ends once"
        assert posted.completion is not None
        posted.reported = True
        return Finished(posted.owner, posted.completion)

    def _late(self, when: str) -> CommandDeadlineError:
        return CommandDeadlineError(
            f"{self._where}: a deadline passed {when}",
            next_step="Look at the load and the health of target and network; the connection is made anew by itself.",
        )

    def _lost(self, what: str) -> QueueLostError:
        return QueueLostError(
            f"{self._where} {what}", next_step="Nothing, if it reconnects; otherwise see why the connection was lost."
        )
