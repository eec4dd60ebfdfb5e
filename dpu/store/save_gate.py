"""Whether anything may be saved now, and for people why not. No I/O, no clock."""

from __future__ import annotations

import math

from meshfusion.dpu.store.grants import GrantTable
from meshfusion.dpu.store.save_health import SaveHealth
from meshfusion.dpu.store.segments import Segments


class SaveGate:
    """``quarantine_max_fraction``: of the segments, above it saves stop, and hits go on (rule 3)."""

    def __init__(
        self, segments: Segments, grants: GrantTable, health: SaveHealth, *, quarantine_max_fraction: float
    ) -> None:
        self._segments = segments
        self._grants = grants
        self._health = health
        self._quarantine_max_fraction = quarantine_max_fraction

    def retune(self, *, quarantine_max_fraction: float) -> None:
        self._quarantine_max_fraction = quarantine_max_fraction

    def refuses(self, now_s: float) -> bool:
        """Also what is written on the pool's own account. That there is no room is found where it is looked for."""
        return self._health.refuses(now_s) or self._is_quarantine_full()

    def reason(self, now_s: float) -> str:
        """For people, with since when and what to do; "" while saves work."""
        if reason := self._health.reason(now_s):
            return reason
        if self._is_quarantine_full():
            count = self._grants.quarantined_segment_count
            return f"{count} segments are quarantined: their writers are silent, not fenced; end these engines"
        wait_s = self._segments.opening_wait_s(now_s)
        if math.isinf(wait_s):
            return "no drive of the pool takes writes: mfctl jbof drives says why"
        if wait_s:
            return (
                "the drives' writes for now are spent (medium.drive_writes_per_day): when what is open is full, the "
                f"next segment is opened in {math.ceil(wait_s / 60)} min"
            )
        return ""

    def _is_quarantine_full(self) -> bool:
        limit = self._quarantine_max_fraction * self._segments.geometry.segment_count
        return self._grants.quarantined_segment_count > limit
