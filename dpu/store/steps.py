"""Steps and their transactions: a reply, what must be durable before it leaves, and what waits for that.

A step with effects has a ticket, and what hangs on its transaction is kept as :class:`Pending` until the transaction's
fate is known: see :mod:`~meshfusion.dpu.store.settling`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from meshfusion.dpu.api.types import ChunkRecord
from meshfusion.dpu.store.effects import Effect
from meshfusion.dpu.store.grants import Grant
from meshfusion.jbof.segments import SegmentRecord

Reply = TypeVar("Reply", covariant=True)
AnyReply = TypeVar("AnyReply")


@dataclass(frozen=True, slots=True)
class Step(Generic[Reply]):
    """A reply, and the effects that must be durable before it leaves.

    ``ticket``: name it to ``durable``/``failed`` when it has effects. ``after``: a ticket of an earlier step that must
    be durable too before this reply may leave.
    """

    reply: Reply
    effects: tuple[Effect, ...] = ()
    ticket: int = 0
    after: int = 0


@dataclass(slots=True)
class Pending:
    """What a transaction carries. ``admitted`` and ``fenced``: ids of holders."""

    opened: list[SegmentRecord] = field(default_factory=list)
    committing: list[tuple[Grant, ChunkRecord]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)
    summarizing: tuple[SegmentRecord, ...] = ()
    given_up: SegmentRecord | None = None


class Transactions:
    """Those whose fate is not known yet, by ticket."""

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        self._ticket = 0

    @property
    def next_ticket(self) -> int:
        """That of the step that is begun next."""
        return self._ticket + 1

    def begin(
        self, reply: AnyReply, effects: tuple[Effect, ...], pending: Pending | None = None, *, after: int = 0
    ) -> Step[AnyReply]:
        """``pending``: None when the transaction carries nothing that waits for it."""
        self._ticket += 1
        self._pending[self._ticket] = Pending() if pending is None else pending
        return Step(reply, effects, self._ticket, after)

    def end(self, ticket: int) -> Pending:
        """Its fate is known; to be told once."""
        return self._pending.pop(ticket)
