"""Is there a way to the data? Nothing is promised to a scheduler before every worker has said so. No I/O, no clock.

Connecting to a target takes a worker longer than a lookup may take (rule 8). It is waited for once, when an engine has
just started, since the first requests would otherwise be recomputed for nothing; never again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshfusion.dpu.api.types import Reached

PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class PathState:
    """Of the worker ``rank``, for the incarnation ``holder_id``. ``problem``: why its path is not open; empty: it
    is. ``reached``: which drives it leads to, where that is not the service's to see."""

    holder_id: str
    problem: str = ""
    rank: int = 0
    reached: Reached | None = None


class Gate(enum.Enum):
    OPEN = "open"
    WAIT = "wait"  # ask again
    CLOSED = "closed"  # every lookup is a miss


class PathGate:
    def __init__(self, rank_count: int = 1, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._began_s: float | None = None
        self._states: list[PathState | None] = [None] * rank_count  # of each rank; None: it has said nothing yet

    def stepped(self, now_s: float) -> None:
        """A step goes to the workers, with an attachment unless the service has gone: that is not waited for longer."""
        if self._began_s is None:
            self._began_s = now_s

    def workers_told(self, state: PathState) -> None:
        self._states[state.rank] = state

    def reached(self, holder_id: str) -> Reached | None:
        """What all workers reach as this incarnation; None while one has not said so."""
        told = [s.reached for s in self._states if s is not None and s.holder_id == holder_id and not s.problem]
        known = [reached for reached in told if reached is not None]
        if len(known) < len(self._states):
            return None
        namespaces = frozenset.intersection(*(frozenset(reached.namespaces) for reached in known))
        return Reached(min(reached.drives_version for reached in known), tuple(sorted(namespaces)))

    def look(self, now_s: float) -> Gate:
        if any(state is not None and state.problem for state in self._states):
            return Gate.CLOSED
        if None not in self._states:
            return Gate.OPEN
        return Gate.WAIT if self.needs_steps(now_s) else Gate.CLOSED

    def needs_steps(self, now_s: float) -> bool:
        """Workers are told of an attachment by a step, and tell by one, also when there is nothing else to do."""
        if None not in self._states:
            return False
        return self._began_s is None or now_s - self._began_s < self._patience_s
