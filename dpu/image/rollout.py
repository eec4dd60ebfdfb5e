"""The order in which many cards are flashed: a bounded rollout, as a state machine. No I/O, no clock.

First the canaries; only when every one of them has succeeded, the rest. At no time are more than ``max_unavailable``
cards out of service; one that failed counts, unless it is known to serve as it did before. After more than
``max_failures`` failures nothing new begins; what runs goes on to its end, since a card at work must not be left alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    HELD_BACK = "held back"
    """Never begun, since the rollout stopped."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """``max_failures``: as many may fail before it stops; any canary's failure stops it."""

    canaries: int = 1
    max_unavailable: int = 1
    max_failures: int = 0

    def __post_init__(self) -> None:
        assert min(self.canaries, self.max_failures) >= 0, self
        assert self.max_unavailable >= 1, self


class Rollout:
    """``names``: of the cards, each once, in their order. ``done``: those that need nothing, from an earlier run."""

    def __init__(self, names: Sequence[str], limits: RolloutLimits, *, done: frozenset[str] = frozenset()) -> None:
        assert len(set(names)) == len(names), names
        self._limits = limits
        self._states = {name: State.DONE if name in done else State.WAITING for name in names}
        self._canaries = tuple(name for name in names if name not in done)[: limits.canaries]
        self._serves_as_before: set[str] = set()
        self._why_stopped = ""

    @property
    def states(self) -> dict[str, State]:
        return dict(self._states)

    @property
    def why_stopped(self) -> str:
        """ "" while nothing keeps it from going on."""
        return self._why_stopped

    @property
    def is_over(self) -> bool:
        return not any(state in (State.WAITING, State.RUNNING) for state in self._states.values())

    def begin_next(self) -> tuple[str, ...]:
        """Which cards to begin with now; they count as running from here on."""
        begun = []
        while (name := self._next()) is not None:
            self._states[name] = State.RUNNING
            begun.append(name)
        return tuple(begun)

    def ended(self, name: str, *, is_done: bool, serves_as_before: bool = False) -> None:
        """``serves_as_before``: of one that failed and was given back."""
        assert self._states[name] is State.RUNNING, (name, self._states[name])
        self._states[name] = State.DONE if is_done else State.FAILED
        if serves_as_before and not is_done:
            self._serves_as_before.add(name)
        failed, out_of_service = self._count(State.FAILED), self._out_of_service
        if not is_done and name in self._canaries:
            self.stop(f"the canary {name} failed")
        elif failed > self._limits.max_failures:
            self.stop(f"{failed} failed, and {self._limits.max_failures} may")
        elif out_of_service >= self._limits.max_unavailable:
            self.stop(f"{out_of_service} failed and are out of service, and no more may be")

    def stop(self, why: str) -> None:
        """Nothing new begins."""
        self._why_stopped = self._why_stopped or why
        for name, state in self._states.items():
            if state is State.WAITING:
                self._states[name] = State.HELD_BACK

    def _next(self) -> str | None:
        if self._count(State.RUNNING) + self._out_of_service >= self._limits.max_unavailable:
            return None
        waiting = [name for name, state in self._states.items() if state is State.WAITING]
        canaries = [name for name in self._canaries if self._states[name] is not State.DONE]
        if canaries:
            return next((name for name in canaries if self._states[name] is State.WAITING), None)
        return waiting[0] if waiting else None

    @property
    def _out_of_service(self) -> int:
        """Of those that have ended."""
        return self._count(State.FAILED) - len(self._serves_as_before)

    def _count(self, state: State) -> int:
        return sum(other is state for other in self._states.values())
