"""One queue pair under anything in any order: an account kept aside says what must not happen."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.io_commands import flush, read
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import (
    Finished,
    InDoubt,
    MemoryFree,
    NotSent,
    QueueEffect,
    QueueState,
)
from meshfusion.jbof.nvme.sgl import RemoteMemory, window_data
from meshfusion.jbof.nvme.transport import (
    Bind,
    InvalidateKey,
    KeyInvalidated,
    LinkBroken,
    LinkDead,
    PostCapsule,
    Sent,
)
from tests.jbof.nvme.queue_bench import BROKEN, LINK, live_queue, queue_with_windows, response


class QueueMachine(RuleBasedStateMachine):
    """``ends``: of each command, by its owner's number."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.new_queue()
        self.now_s = 0.0
        self.deadlines: dict[int, float] = {}
        self.ends: dict[int, list[type]] = {}
        self.unsent: set[int] = set()
        self.unanswered: set[int] = set()
        self.next_owner = 0

    def new_queue(self) -> QueuePair:
        return live_queue(depth=4, max_waiting=2)

    def command(self, owner: int) -> Command:
        return flush(1)

    def absorb(self, effects: Sequence[QueueEffect]) -> None:
        for effect in effects:
            match effect:
                case PostCapsule(_, command_id, _, _):
                    assert command_id not in self.unsent | self.unanswered, "an identifier in use"
                    self.unsent.add(command_id)
                    self.unanswered.add(command_id)
                    assert len(self.unsent | self.unanswered) <= 3
                case Finished(owner, _) | NotSent(owner, _) | InDoubt(owner, _):
                    assert isinstance(owner, int)
                    assert self.ends[owner] == [], "a command ends twice"
                    self.ends[owner].append(type(effect))
                    if isinstance(effect, Finished):
                        assert self.now_s < self.deadlines[owner], "late"
                case MemoryFree(owner):
                    assert isinstance(owner, int)
                    assert self.queue.state is QueueState.DEAD, "memory is free before the queue pair is dead"
                    assert self.ends[owner] == [InDoubt]
                    self.ends[owner].append(MemoryFree)

    @rule(wait_s=st.floats(0.01, 3.0))
    def submit(self, wait_s: float) -> None:
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        self.deadlines[owner], self.ends[owner] = self.now_s + wait_s, []
        self.absorb(self.queue.submit(self.now_s, owner, self.command(owner), self.now_s + wait_s))

    @precondition(lambda self: self.unsent and self.queue.state is QueueState.LIVE)
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.unsent)))
        self.unsent.discard(command_id)
        self.absorb(self.queue.handle(self.now_s, Sent(LINK, command_id)))

    @precondition(lambda self: self.unanswered and self.queue.state is not QueueState.DEAD)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.unanswered)))
        self.unanswered.discard(command_id)
        self.absorb(self.queue.handle(self.now_s, response(command_id)))

    @rule(step_s=st.floats(0.0, 1.0))
    def pass_time(self, step_s: float) -> None:
        self.now_s += step_s
        self.absorb(self.queue.tick(self.now_s))
        for owner, deadline_s in self.deadlines.items():
            assert self.ends[owner] or self.now_s < deadline_s, "something outlives its deadline"

    @precondition(lambda self: self.queue.state is not QueueState.DEAD)
    @rule()
    def breaks(self) -> None:
        self.absorb(self.queue.handle(self.now_s, LinkBroken(LINK, BROKEN)))

    @precondition(lambda self: self.queue.state is QueueState.DYING)
    @rule()
    def dies(self) -> None:
        self.absorb(self.queue.handle(self.now_s, LinkDead(LINK)))
        assert all(ends in ([Finished], [NotSent], [InDoubt, MemoryFree]) for ends in self.ends.values())

    @invariant()
    def loss_ends_all(self) -> None:
        if self.queue.state is not QueueState.LIVE:
            assert all(self.ends.values()), "a command neither ended nor under way"


class WindowMachine(QueueMachine):
    """``live``: bound keys, by the owner of their command; ``dying``: those that are being invalidated."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Bind] = {}
        self.bound: dict[int, tuple[int, Bind]] = {}  # owner and bind of each command that was posted last
        self.dying: dict[int, int] = {}  # owners, by command

    def new_queue(self) -> QueuePair:
        return queue_with_windows(depth=4, max_waiting=2)

    def command(self, owner: int) -> Command:
        return read(1, 0, 2, window_data(RemoteMemory((owner + 1) << 16, 8192, 5)))

    def absorb(self, effects: Sequence[QueueEffect]) -> None:
        for effect in effects:
            match effect:
                case Finished(owner, _):
                    assert owner not in self.live, "a command ends while its key lives"
                case PostCapsule(_, command_id, _, bind):
                    assert bind is not None
                    assert bind.key not in {other.key for other in self.live.values()}
                    assert bind.window not in {other.window for other in self.live.values()}
                    owner_number = (bind.memory.address >> 16) - 1
                    self.live[owner_number] = bind
                    self.bound[command_id] = owner_number, bind
                case InvalidateKey(_, command_id, key):
                    owner_number, bind = self.bound[command_id]
                    assert self.live[owner_number] == bind
                    assert bind.key == key
                    self.dying[command_id] = owner_number
        super().absorb(effects)

    @precondition(lambda self: self.unanswered and self.queue.state is QueueState.LIVE)
    @rule(data=st.data())
    def answered_with_the_key(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.unanswered)))
        self.unanswered.discard(command_id)
        owner, bind = self.bound[command_id]
        del self.live[owner]
        self.absorb(self.queue.handle(self.now_s, response(command_id)._replace(invalidated_key=bind.key)))

    @precondition(lambda self: self.dying and self.queue.state is QueueState.LIVE)
    @rule(data=st.data())
    def key_dies(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.dying)))
        del self.live[self.dying.pop(command_id)]
        self.absorb(self.queue.handle(self.now_s, KeyInvalidated(LINK, command_id)))


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
