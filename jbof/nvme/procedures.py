"""Conversations with a target, written as they are held: generators that yield steps and get answers.

A procedure does no I/O and knows no clock but its answers. What it raises ends it; a status that is not success is
raised inside of it, at the step, as :class:`~meshfusion.jbof.nvme.status.NvmeCommandError`. When the connection is
lost, a procedure ends where it stands: by :class:`Abandoned`, in place of which it may raise what the loss means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.command import Command, Opcode
from meshfusion.jbof.nvme.completion import Completion
from meshfusion.jbof.nvme.queue_effects import CommandEffect, Finished, InDoubt, NotSent
from meshfusion.jbof.nvme.sgl import NO_DATA, DataPointer, remote_data
from meshfusion.jbof.nvme.status import NvmeCommandError
from meshfusion.jbof.nvme.transport import SCRATCH_BYTES, Scratch, ScratchPool


class Ask(NamedTuple):
    """Send one command and wait for its completion.

    ``build`` gets where its data is: ``data_bytes`` of scratch memory, which hold ``outgoing`` first.
    """

    build: Callable[[DataPointer], Command]
    data_bytes: int = 0
    outgoing: bytes = b""
    queue_id: int = 0


class Open(NamedTuple):
    """Make the connection of a queue pair."""

    queue_id: int
    depth: int
    controller_id: int = 0


class Pause(NamedTuple):
    seconds: float


class StartKeepAlive(NamedTuple):
    """From now on; the procedure goes on at once."""


class ArmEvents(NamedTuple):
    """Keep this many Asynchronous Event Requests outstanding from now on; the procedure goes on at once."""

    how_many: int


Step = Ask | Open | Pause | StartKeepAlive | ArmEvents


class Answer(NamedTuple):
    """``data``: what is in the scratch memory of an :class:`Ask` afterwards."""

    now_s: float
    result: int = 0
    sq_head: int = 0
    data: bytes = b""


Result = TypeVar("Result")
Procedure = Generator[Step, Answer, Result]


class Abandoned(Exception):
    """Raised inside of a procedure, which may not go on: the connection is lost because of ``error``."""

    def __init__(self, error: MeshFusionError) -> None:
        super().__init__(str(error))
        self.error = error


class Ended(NamedTuple):
    """A procedure is over: ``result`` is what it returned unless ``error`` is what it raised."""

    result: Any
    error: MeshFusionError | None


@dataclass(slots=True, eq=False)
class Conversation:
    """A procedure under way. ``resume_s``: when its pause ends."""

    procedure: Procedure[Any]
    on_end: Callable[[float, Ended], list[Any]]
    resume_s: float = math.inf
    is_over: bool = False


@dataclass(slots=True, eq=False)
class AskUnderWay:
    """Owner of the command of an :class:`Ask`."""

    conversation: Conversation
    opcode: Opcode
    scratch: Scratch | None
    data_bytes: int


class Performer(Protocol):
    """Who carries out what conversations want. Effects are its own."""

    def send(self, now_s: float, queue_id: int, owner: AskUnderWay, command: Command) -> list[Any]: ...

    def perform(self, now_s: float, step: Open | StartKeepAlive | ArmEvents, conversation: Conversation) -> list[Any]:
        """An :class:`Open` is answered with :meth:`Conversations.opened`, the others need no answer."""
        ...


class Conversations:
    """All procedures of one controller. ``where`` names it in errors."""

    def __init__(self, performer: Performer, scratch_pool: ScratchPool, *, where: str) -> None:
        self._performer = performer
        self._scratch_pool = scratch_pool
        self._where = where
        self._running: list[Conversation] = []

    @property
    def count(self) -> int:
        """Those under way; each needs at most one piece of scratch memory at a time."""
        return len(self._running)

    @property
    def next_deadline_s(self) -> float:
        return min((conversation.resume_s for conversation in self._running), default=math.inf)

    def begin(self, now_s: float, procedure: Procedure[Any], on_end: Callable[[float, Ended], list[Any]]) -> list[Any]:
        """``on_end`` is called once, and its effects are returned by what ended it."""
        conversation = Conversation(procedure, on_end)
        self._running.append(conversation)
        return self._go_on(now_s, conversation, lambda: next(procedure))

    def opened(self, now_s: float, conversation: Conversation) -> list[Any]:
        """The queue pair of its :class:`Open` is up."""
        return self._answer(conversation, Answer(now_s))

    def tick(self, now_s: float) -> list[Any]:
        effects: list[Any] = []
        for conversation in [c for c in self._running if now_s >= c.resume_s]:
            conversation.resume_s = math.inf
            if not conversation.is_over:  # what another led to may have ended it
                effects += self._answer(conversation, Answer(now_s))
        return effects

    def handle(self, now_s: float, effect: CommandEffect, ask: AskUnderWay) -> list[Any]:
        """What became of the command of an :class:`Ask`. Scratch memory goes back when nobody can touch it any more."""
        if isinstance(effect, InDoubt):
            return []  # the queue is lost, and with it the controller: see abandon
        data = b""
        if ask.scratch is not None:
            if isinstance(effect, Finished):
                data = ask.scratch.read(ask.data_bytes)
            self._scratch_pool.give_back(ask.scratch)
            ask.scratch = None
        if ask.conversation.is_over:
            return []
        match effect:
            case Finished(_, completion) if completion.status.is_success:
                return self._answer(ask.conversation, _answer_of(now_s, completion, data))
            case Finished(_, completion):
                error: MeshFusionError = NvmeCommandError(completion.status, ask.opcode, where=self._where)
                return self._throw(now_s, ask.conversation, error)
            case NotSent(_, error):
                return self._throw(now_s, ask.conversation, error)
            case _:
                raise AssertionError(f"{effect} while its conversation goes on")

    def abandon(self, now_s: float, error: MeshFusionError) -> tuple[list[Any], MeshFusionError]:
        """The connection is lost because of ``error``: end all. Returns effects, and the error as it is explained."""
        running, self._running = self._running, []
        effects: list[Any] = []
        explained = error
        for conversation in running:
            conversation.is_over = True
            meaning = _meaning(conversation.procedure, error)
            explained = meaning if meaning is not error else explained
            effects += conversation.on_end(now_s, Ended(None, meaning))
        return effects, explained

    def _answer(self, conversation: Conversation, answer: Answer) -> list[Any]:
        return self._go_on(answer.now_s, conversation, lambda: conversation.procedure.send(answer))

    def _throw(self, now_s: float, conversation: Conversation, error: MeshFusionError) -> list[Any]:
        return self._go_on(now_s, conversation, lambda: conversation.procedure.throw(error))

    def _go_on(self, now_s: float, conversation: Conversation, move: Callable[[], Step]) -> list[Any]:
        assert not conversation.is_over
        try:
            step = move()
        except StopIteration as stop:
            return self._end(now_s, conversation, Ended(stop.value, None))
        except MeshFusionError as error:
            return self._end(now_s, conversation, Ended(None, error))
        match step:
            case Ask():
                return self._ask(now_s, conversation, step)
            case Pause(seconds):
                conversation.resume_s = now_s + seconds
                return []
            case Open():
                return self._performer.perform(now_s, step, conversation)
            case StartKeepAlive() | ArmEvents():
                effects = self._performer.perform(now_s, step, conversation)
                return effects + self._answer(conversation, Answer(now_s))

    def _end(self, now_s: float, conversation: Conversation, ended: Ended) -> list[Any]:
        conversation.is_over = True
        self._running.remove(conversation)
        return conversation.on_end(now_s, ended)

    def _ask(self, now_s: float, conversation: Conversation, ask: Ask) -> list[Any]:
        scratch, data = None, NO_DATA
        if ask.data_bytes:
            assert len(ask.outgoing) <= ask.data_bytes <= SCRATCH_BYTES
            scratch = self._scratch_pool.lend()
            assert scratch is not None, "conversations are few, and each has one command under way"
            scratch.write(ask.outgoing or bytes(ask.data_bytes))
            data = remote_data(scratch.remote.part(0, ask.data_bytes))
        command = ask.build(data)
        owner = AskUnderWay(conversation, command.opcode, scratch, ask.data_bytes)
        return self._performer.send(now_s, ask.queue_id, owner, command)


def _meaning(procedure: Procedure[Any], error: MeshFusionError) -> MeshFusionError:
    """End ``procedure`` because of ``error``; the error that it leaves with."""
    try:
        procedure.throw(Abandoned(error))
    except Abandoned:
        return error
    except MeshFusionError as meaning:
        return meaning
    raise AssertionError("a procedure goes on without a connection")


def _answer_of(now_s: float, completion: Completion, data: bytes) -> Answer:
    return Answer(now_s, completion.result, completion.sq_head, data)
