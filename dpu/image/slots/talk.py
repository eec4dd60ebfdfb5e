"""How each part of an upgrade asks its card: with deadlines, again where that helps, and until the operator wants it to
end. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.slots import words
from meshfusion.dpu.image.slots.card_state import CardState
from meshfusion.dpu.image.slots.types import (
    Acted,
    Deadlines,
    Effect,
    Event,
    Faulted,
    Look,
    Looked,
    Phase,
    Probe,
    Probed,
    Wait,
)

RETRY_S: Final = 2.0
PASSING: Final = frozenset({FaultKind.BUSY, FaultKind.GONE, FaultKind.UNREACHABLE})

Steps = Generator[Effect, Event, None]
Asking = Generator[Effect, Event, Event]
Trying = Generator[Effect, Event, Faulted | None]
Looking = Generator[Effect, Event, CardState]


class EndedError(Exception):
    """``end``: how; ``in_phase``: where, None for the phase of now."""

    def __init__(self, end: Phase, problem: str, next_step: str, in_phase: Phase | None = None) -> None:
        super().__init__(problem)
        self.end, self.problem, self.next_step, self.in_phase = end, problem, next_step, in_phase


class FaultedError(EndedError):
    """The card was not reached, or did not do it."""


class Talk:
    """``now_s``: to be set before each step. ``state``: as last seen. ``text``: of what is waited for."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self.phase = Phase.CHECKING
        self.now_s = 0.0
        self._entered_s = 0.0
        self.state: CardState | None = None
        self.text = ""
        self.notes: tuple[str, ...] = ()
        self.is_interrupted = False
        self.may_be_interrupted = True

    def do(self, effect: Effect) -> Asking:
        event = yield effect
        if self.is_interrupted and self.may_be_interrupted:
            raise EndedError(Phase.STOPPED, "interrupted", words.GO_ON)
        return event

    def insist(self, effect: Effect, *, passes: FaultKind | None = None) -> Asking:
        """Until it is done: each effect can be repeated. Raises for a fault that does not pass, but for ``passes``."""
        while True:
            event = yield from self.do(effect)
            if not isinstance(event, Faulted):
                if isinstance(event, Acted):
                    self.note(event.note)
                return event
            if event.kind is passes:
                return event
            if event.kind not in PASSING:
                raise failed(event)
            if self.is_late:
                raise self.late(event.message, event.next_step)
            yield from self.do(Wait(self.now_s + RETRY_S))

    def look(self) -> Looking:
        event = yield from self.insist(Look())
        assert isinstance(event, Looked), event
        self.state = event.state
        return event.state

    def probe(self) -> Generator[Effect, Event, Probed]:
        event = yield from self.insist(Probe())
        assert isinstance(event, Probed), event
        return event

    def enter(self, phase: Phase) -> None:
        self.phase, self._entered_s, self.text = phase, self.now_s, ""

    @property
    def is_late(self) -> bool:
        return self.now_s - self._entered_s >= self.deadlines.of(self.phase)

    def late(self, why: str = "", next_step: str = words.GO_ON) -> FaultedError:
        took = f"{self.phase.value} took longer than the {self.deadlines.of(self.phase):g} s it may take"
        return FaultedError(Phase.FAILED, f"{took}: {why}" if why else took, next_step)

    def note(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes = (*self.notes, note)


def failed(fault: Faulted) -> FaultedError:
    return FaultedError(Phase.FAILED, fault.message, fault.next_step)
