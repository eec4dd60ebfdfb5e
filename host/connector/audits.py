"""Shadow audit: a small share of hits is recomputed on purpose and compared with what the pool has. No I/O, no clock.

Digests prove that the bytes loaded are the bytes saved. They do not prove that these are right: an identity that leaves
out a cause of the bytes, a chunk under another's key, or an engine that computed nonsense has right digests too. Here a
hit is answered as a miss, the engine computes the prompt, and its blocks are compared with the stored ones as numbers.

What they may differ by is the engine's own run-to-run variation. It is measured: when the same block is audited again,
the two *computations* are compared, in which the pool has no part. A difference of more than :data:`MARGIN` times the
largest such one is an alarm. Until one was measured, and below it, the rounding of the dtype counts; above
:data:`CEILING` nothing is put down to variation, so that an engine that varies wildly cannot hide what the audit is
for. Enough alarms, and this engine serves no hits any more until it is started anew.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshfusion.host.pool_events import NOTHING_STORED, StoredBoundary

MARGIN: Final = 4.0
CEILING: Final = 0.5
"""A number that is off by half of the largest in its page. KV of other tokens is off by about the whole."""
WAIT_S: Final = 120.0
"""A chosen request that is not computed by then is let go of, and with it its lease."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """``share``: of hits that are audited, 0 to 1. ``alarms_max``: after so many no hits are served any more."""

    share: float
    alarms_max: int


class BlockDrift(NamedTuple):
    """``unit``: which of its audit, from 0; ``rank``: on which; the others as of a
    :class:`meshfusion.host.kv.drift.Drift`."""

    unit: int
    layer: str
    difference: float
    floor: float
    rank: int = 0


class Verdict(NamedTuple):
    """``alarms``: of each block that differs by more than it may, with what it may."""

    request_id: str
    alarms: tuple[tuple[BlockDrift, float], ...] = ()
    is_last_straw: bool = False  # from now on nothing is trusted


class Stage(enum.Enum):
    CHOSEN = "chosen"  # told that nothing is stored; may be asked about, admitted and preempted any number of times
    COMPARING = "comparing"  # its blocks are pinned and the workers compare them


@dataclass(slots=True)
class _Audit:
    request_id: str
    since_s: float
    stage: Stage = Stage.CHOSEN
    local_tokens: int = 0
    stored: StoredBoundary = NOTHING_STORED
    is_void: bool = False  # nothing follows from what comes of it


class Audits:
    """Of one scheduler; one audit at a time. ``draw``: a number of [0, 1), each as likely as any other."""

    def __init__(self, options: AuditOptions, draw: Callable[[], float]) -> None:
        self._options = options
        self._draw = draw
        self._audit: _Audit | None = None
        self._alarms = 0
        self._variation = 0.0
        self._drift_max = 0.0
        self.counters: Counter[str] = Counter()

    @property
    def is_distrusted(self) -> bool:
        """Have there been so many alarms that no hit may be served?"""
        return self._alarms >= self._options.alarms_max

    @property
    def is_comparing(self) -> bool:
        return self._audit is not None and self._audit.stage is Stage.COMPARING

    @property
    def count(self) -> int:
        """Audits that have begun and not ended: 0 or 1."""
        return int(self._audit is not None)

    @property
    def variation(self) -> float:
        """The largest difference of two computations so far."""
        return self._variation

    @property
    def drift_max(self) -> float:
        """The largest difference of what was stored and what was computed so far."""
        return self._drift_max

    # ---- one audit -----------------------------------------------------------------------------------------------

    def choose(self, now_s: float, request_id: str) -> bool:
        """A hit is about to be answered for the first time: shall it be audited? Then answer it as a miss."""
        if self._audit is not None or not self._options.share or self._draw() >= self._options.share:
            return False
        self._audit = _Audit(request_id, now_s)
        self.counters["audits_started"] += 1
        return True

    def admitted(self, request_id: str, local_tokens: int, stored: StoredBoundary) -> None:
        """It is computed from ``local_tokens`` on, the rest comes from the engine's own cache."""
        audit = self._audit
        if audit is not None and audit.request_id == request_id and audit.stage is Stage.CHOSEN:
            audit.local_tokens, audit.stored = local_tokens, stored

    def due(self, request_id: str, computed_tokens: int, chunk_tokens: int) -> tuple[int, StoredBoundary] | None:
        """The step now scheduled brings a request to ``computed_tokens``. When all that is stored of it has then been
        computed: from which token on, and what is stored."""
        audit = self._audit
        if audit is None or audit.request_id != request_id or audit.stage is not Stage.CHOSEN:
            return None
        boundary_tokens = audit.stored.chunk_count * chunk_tokens
        return (audit.local_tokens, audit.stored) if 0 < boundary_tokens <= computed_tokens else None

    def compared(self) -> None:
        """Its blocks have been given to the workers."""
        assert self._audit is not None
        self._audit.stage = Stage.COMPARING

    def give_up(self, request_id: str) -> bool:
        """It cannot be compared, or has ended too early. True: it was the one being audited, and its lease may go."""
        audit = self._audit
        if audit is None or audit.request_id != request_id or audit.stage is Stage.COMPARING:
            return False
        self._audit = None
        self.counters["audits_without_verdict"] += 1
        return True

    def late(self, now_s: float) -> str | None:
        """The request that was waited for in vain, to be given up."""
        audit = self._audit
        is_late = audit is not None and audit.stage is Stage.CHOSEN and now_s - audit.since_s >= WAIT_S
        return audit.request_id if audit is not None and is_late else None

    def void(self) -> str | None:
        """The engine's cache was reset, perhaps since its weights changed: what is stored and what is computed may
        differ rightly. The request to be given up, if its comparison has not begun."""
        audit = self._audit
        if audit is None:
            return None
        audit.is_void = True
        return audit.request_id if audit.stage is Stage.CHOSEN else None

    # ---- what comes of it ----------------------------------------------------------------------------------------

    def reported(self, drifts: Sequence[BlockDrift], variation: float) -> Verdict:
        """The workers have compared; nothing of it holds memory any more. ``drifts``: of each block on each rank; none:
        it could not be done. ``variation``: of two computations of the same block, the largest, where there were
        two."""
        audit, self._audit = self._audit, None
        assert audit is not None
        assert audit.stage is Stage.COMPARING
        if audit.is_void or not drifts:
            self.counters["audits_without_verdict"] += 1
            return Verdict(audit.request_id)
        self._variation = max(self._variation, variation)
        self._drift_max = max(self._drift_max, *(drift.difference for drift in drifts))
        self.counters["audited_blocks"] += len(drifts)
        alarms = tuple(
            (drift, allowed) for drift in drifts if drift.difference > (allowed := self.tolerance(drift.floor))
        )
        if not alarms:
            return Verdict(audit.request_id)
        self._alarms += 1
        self.counters["audit_alarms"] += 1
        return Verdict(audit.request_id, alarms, is_last_straw=self._alarms == self._options.alarms_max)

    def tolerance(self, floor: float) -> float:
        """What a block may differ by whose dtype's rounding alone may make ``floor`` of it."""
        return min(CEILING, max(floor, MARGIN * self._variation))
