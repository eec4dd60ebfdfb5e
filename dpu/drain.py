"""When a service that is to stop may do so: nobody has anything open, or its time is over. No I/O, no clock."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshfusion.dpu.api.service_types import Phase


class Held(NamedTuple):
    """What others have open: ``writes`` that may yet be committed, and ``leases`` of readers. A write of unknown fate
    is none of them: only a fence ends it, and the service's next life sees to that as well (rule 3)."""

    writes: int = 0
    leases: int = 0

    @property
    def is_nothing(self) -> bool:
        return not (self.writes or self.leases)


class Drain:
    """Serving; then, once asked, draining; then at an end for good, see :class:`Phase`.

    While it drains nothing new is to be let in, so that what is open only becomes less: but for leases, since lookups
    are answered until engines know better.
    """

    def __init__(self) -> None:
        self._phase = Phase.SERVING
        self._end_s = math.inf

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def refuses_new(self) -> bool:
        return self._phase is not Phase.SERVING

    def begin(self, now_s: float, within_s: float) -> None:
        """What is open may end ``within_s`` from now. Asked again, the sooner end holds: whoever wants the service gone
        by then can rely on it."""
        assert within_s >= 0
        self._end_s = min(self._end_s, now_s + within_s)
        if self._phase is Phase.SERVING:
            self._phase = Phase.DRAINING

    def look(self, now_s: float, held: Held) -> Phase:
        """``held``: everything, also what is being asked for at this moment."""
        if self._phase is Phase.DRAINING:
            if held.is_nothing:
                self._phase = Phase.DRAINED
            elif now_s >= self._end_s:
                self._phase = Phase.CUT_SHORT
        return self._phase

    def remaining_s(self, now_s: float) -> float:
        return max(0.0, self._end_s - now_s) if self._phase is Phase.DRAINING else 0.0
