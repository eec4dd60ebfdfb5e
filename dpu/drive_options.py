"""How the drives of a pool that is served are watched."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.jbof.drives.life import LifeLimits


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """``check_interval_s``: how often each drive is looked at. ``probation_s``: how long one that came back must stay
    before it is used. ``drain_s``: in so long a drive is emptied. ``window_s``: latencies of so long are compared.
    ``look_deadline_s``: a look that takes longer is a command that failed. ``answer_deadline_s``: a drive that leaves a
    write of the service's own unanswered for so long is written to only when it has answered."""

    check_interval_s: float = 5.0
    probation_s: float = 30.0
    drain_s: float = 600.0
    window_s: float = 30.0
    health_interval_s: float = 60.0
    look_deadline_s: float = 10.0
    answer_deadline_s: float = 10.0

    @property
    def limits(self) -> LifeLimits:
        return LifeLimits(probation_s=self.probation_s, max_probation_s=max(self.probation_s, 3600.0))
