"""One request's way through the cache, as a state machine: looked up, promised, loading, done.

No I/O and no clock: time and answers come in, effects go out. It keeps rule 7 (the same absolute boundary is promised
until released, and nothing outlives its request) and the lookup part of rule 8 (an answer within the deadline, or a
miss). The engine may ask about a request any number of times, admit it with less than was promised, preempt it, or
never schedule it at all; every path ends in exactly one release of its lease.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.host.connector.load_parts import LoadPart, load_bytes, load_parts
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.pool_events import NOTHING_STORED, StoredBoundary


class StartMatch(NamedTuple):
    """Ask the service about this request's leading chunks. ``attempt`` comes back with the answer."""

    request_id: str
    attempt: int


class ReleaseLease(NamedTuple):
    lease_id: str


class StartLoad(NamedTuple):
    """Bring units into device memory: ``parts`` of all KV groups, in their order. ``load_bytes``: of each rank.

    ``stored``: the whole promise, to find the chunk a unit belongs to. ``refusal``: why this load must fail instead,
    with nothing brought: the engine cannot be told no any more. ``tokens``: of the request, what was allotted.
    """

    request_id: str
    parts: tuple[LoadPart, ...]
    load_bytes: int
    stored: StoredBoundary
    refusal: str = ""
    tokens: range = range(0)


class StartAudit(NamedTuple):
    """Admitted, to be computed from ``local_tokens`` on although ``stored`` is stored, which stays leased until
    :meth:`Lookups.audit_ended`. May come again, after a preemption."""

    request_id: str
    local_tokens: int
    stored: StoredBoundary


Effect = StartMatch | ReleaseLease | StartLoad | StartAudit


class Phase(enum.Enum):
    LOOKING = "looking"
    PROMISED = "promised"
    MISSED = "missed"
    LOADING = "loading"
    AUDITED = "audited"  # answered as a miss, to be compared with what is stored
    IDLE = "idle"  # admitted, or its promise was released: the next question starts a new lookup


@dataclass(slots=True)
class _Lookup:
    phase: Phase
    attempt: int = 0
    asked_s: float = 0.0
    promised_s: float = 0.0
    stored: StoredBoundary = NOTHING_STORED
    lease_id: str = ""
    local_tokens: int = 0
    may_reuse: bool = True  # False after a failed load: it is recomputed, never retried
    is_finished: bool = False
    is_answered: bool = False  # a number was given for this promise: it may not change any more


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """``deadline_s``: a service that answers nothing for this long is not waited for: what is asked counts as a miss
    (rule 8). ``patience_s``: how long one lookup waits in a queue that does move, so that a burst of requests is not
    a burst of misses. ``soft_lease_max_s``: an unused promise is given back after this time. ``early_lookups_max``:
    how many requests may hold a promise before the engine asks."""

    deadline_s: float = 0.020
    patience_s: float = 0.250
    soft_lease_max_s: float = 120.0
    early_lookups_max: int = 256


def _is_never(request_id: str) -> bool:
    return False


class Lookups:
    """All requests of one scheduler. ``form``: the KV groups of its engine, and how they are cut into chunks."""

    def __init__(self, options: LookupOptions, form: ChunkForm) -> None:
        self._options = options
        self._form = form
        self._lookups: dict[str, _Lookup] = {}
        self._attempts = 0
        self._last_answer_s = float("-inf")
        self._leases_changed = False
        self.counters: Counter[str] = Counter()

    # ---- from the engine -----------------------------------------------------------------------------------------

    def new_request(self, now_s: float, request_id: str) -> list[Effect]:
        """A request arrived. Its lookup starts now, long before the scheduler asks."""
        if request_id in self._lookups:
            return []  # known already: starting over would forget what it holds
        lookup = _Lookup(Phase.IDLE)
        self._lookups[request_id] = lookup
        return [self._look(now_s, request_id, lookup)] if self._may_look_early() else []

    def query(
        self,
        now_s: float,
        request_id: str,
        local_tokens: int,
        is_load_worth: Callable[[int, int], bool],
        is_to_be_audited: Callable[[str], bool] = _is_never,
    ) -> tuple[int | None, list[Effect]]:
        """How many tokens beyond ``local_tokens`` can be loaded? None: ask again.

        ``is_load_worth(tokens, bytes)`` decides once per promise whether loading beats recomputing (rule 8), and then
        ``is_to_be_audited(request_id)`` whether what is stored shall be compared instead of loaded.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            lookup = self._lookups[request_id] = _Lookup(Phase.IDLE)
        lookup.local_tokens = local_tokens
        if not lookup.may_reuse:
            return 0, []
        if lookup.phase is Phase.PROMISED and now_s - lookup.promised_s > self._options.soft_lease_max_s:
            self.counters["promises_too_old"] += 1
            release = self._release(lookup)
            return None, [*release, self._look(now_s, request_id, lookup)]
        if lookup.phase is Phase.IDLE:
            return None, [self._look(now_s, request_id, lookup)]
        if lookup.phase is Phase.LOOKING:
            if now_s < self._waits_until_s(lookup):
                return None, []
            self.counters["lookups_timed_out"] += 1
            lookup.phase = Phase.MISSED  # the late answer is released when it comes
        if lookup.phase is not Phase.PROMISED:
            return 0, []
        tokens = max(0, self._boundary_tokens(lookup) - local_tokens)
        if not lookup.is_answered and tokens > 0:
            lookup.is_answered = True
            if not is_load_worth(tokens, load_bytes(self._form, lookup.stored.chunk_count, local_tokens)):
                self.counters["loads_not_worth"] += 1
                effects = self._release(lookup)
                lookup.phase = Phase.MISSED
                return 0, effects
            if is_to_be_audited(request_id):
                lookup.phase = Phase.AUDITED
                return 0, []
        return tokens, []

    def allocated(self, request_id: str, external_tokens: int, block_ids: Sequence[Sequence[int]]) -> list[Effect]:
        """The request was admitted; ``external_tokens`` of it are ours to load (the scheduler may have trimmed them).

        ``block_ids``: for each KV group the device blocks of the whole request, in order.
        """
        lookup = self._lookups.get(request_id)
        if external_tokens == 0:
            if lookup is None or lookup.phase is Phase.LOADING:
                return []  # also the second call, after an asynchronous load
            if lookup.phase is Phase.AUDITED:
                return [StartAudit(request_id, lookup.local_tokens, lookup.stored)]
            effects = self._release(lookup)
            lookup.phase = Phase.IDLE
            return effects
        assert lookup is not None, f"{request_id}: tokens allocated that were never promised"
        assert lookup.phase is Phase.PROMISED, f"{request_id}: allocated while {lookup.phase}"
        first, last = lookup.local_tokens, lookup.local_tokens + external_tokens
        assert last <= self._boundary_tokens(lookup), f"{request_id}: {last} tokens allocated beyond the promise"
        lookup.phase = Phase.LOADING
        self.counters["loads_started"] += 1
        self.counters["tokens_admitted"] += external_tokens
        parts = load_parts(self._form, lookup.stored, first, last, block_ids)
        if parts is None:
            refusal = f"{last} tokens were allotted, and only after {self._boundary_tokens(lookup)} can it resume"
            return [StartLoad(request_id, (), 0, lookup.stored, refusal)]
        part_bytes = [len(part.block_ids) * self._form.unit_bytes[part.group] for part in parts]
        return [StartLoad(request_id, parts, sum(part_bytes), lookup.stored, tokens=range(first, last))]

    def finished(self, request_id: str) -> list[Effect]:
        """Finished, aborted or failed; also requests that were never scheduled. A load or an audit under way keeps its
        lease."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return []
        lookup.is_finished = True
        if lookup.phase in (Phase.LOADING, Phase.AUDITED):
            return []
        del self._lookups[request_id]  # a late answer finds nobody and is released
        return self._release(lookup)

    # ---- from the service and the workers ------------------------------------------------------------------------

    def matched(
        self, now_s: float, request_id: str, attempt: int, lease_id: str, stored: StoredBoundary
    ) -> list[Effect]:
        """The service answered. A late or orphaned answer is given back at once."""
        self._last_answer_s = now_s
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.phase is not Phase.LOOKING or lookup.attempt != attempt:
            return [ReleaseLease(lease_id)] if lease_id else []
        if not stored.chunk_count:
            lookup.phase = Phase.MISSED
            return [ReleaseLease(lease_id)] if lease_id else []
        for plan, group in zip(self._form.plans, stored.groups, strict=True):
            unit_count = len(plan.needed_blocks(stored.chunk_count))
            for columns in (group.unit_lbas, group.unit_digests):
                assert len(columns) == self._form.shard_count(plan.group), (plan.group, len(columns))
                assert {len(column) for column in columns} == {unit_count}, (stored.chunk_count, unit_count)
        lookup.phase = Phase.PROMISED
        lookup.promised_s = now_s
        lookup.stored, lookup.lease_id = stored, lease_id
        self._leases_changed = True
        lookup.is_answered = False
        self.counters["hits"] += 1
        self.counters["tokens_leased"] += self._boundary_tokens(lookup)
        return []

    def leases_lost(self, lease_ids: Sequence[str]) -> None:
        """The service no longer knows these leases: their promises end; loads under way rely on rule 4."""
        lost = set(lease_ids)
        for lookup in self._lookups.values():
            if lookup.lease_id in lost:
                lookup.lease_id = ""
                self._leases_changed = True
                if lookup.phase is Phase.PROMISED:
                    lookup.phase = Phase.IDLE
                    lookup.stored = NOTHING_STORED
                    self.counters["promises_lost"] += 1

    def load_finished(self, request_id: str, *, failed: bool) -> list[Effect]:
        """The workers have reported this load, well or not. After a failure the request never loads again."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.phase is not Phase.LOADING:
            return []
        effects = self._release(lookup)
        lookup.phase = Phase.IDLE
        if failed:
            lookup.may_reuse = False
            lookup.stored = NOTHING_STORED  # they are known no longer to be stored: what is recomputed is worth saving
            self.counters["loads_failed"] += 1
        if lookup.is_finished:
            del self._lookups[request_id]
        return effects

    def audit_ended(self, request_id: str) -> list[Effect]:
        """What is stored of this request has been compared, or never will be."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.phase is not Phase.AUDITED:
            return []
        effects = self._release(lookup)
        lookup.phase = Phase.IDLE
        if lookup.is_finished:
            del self._lookups[request_id]
        return effects

    def reset(self) -> list[Effect]:
        """The cache was reset: every promise ends. Loads under way are left to finish."""
        effects: list[Effect] = []
        for lookup in self._lookups.values():
            if lookup.phase in (Phase.PROMISED, Phase.LOOKING):
                effects += self._release(lookup)
                lookup.phase = Phase.IDLE
        return effects

    # ---- reading -------------------------------------------------------------------------------------------------

    def take_lease_change(self) -> tuple[str, ...] | None:
        """The leases now held, or None when they are the same as at the last call."""
        changed, self._leases_changed = self._leases_changed, False
        return self.live_lease_ids() if changed else None

    def live_lease_ids(self) -> tuple[str, ...]:
        return tuple(lookup.lease_id for lookup in self._lookups.values() if lookup.lease_id)

    def matched_chunk_count(self, request_id: str) -> int:
        """The boundary, in chunks, up to which what is worth storing of this request is known to be stored."""
        lookup = self._lookups.get(request_id)
        return lookup.stored.chunk_count if lookup else 0

    def __len__(self) -> int:
        return len(self._lookups)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _may_look_early(self) -> bool:
        limit = self._options.early_lookups_max
        if len(self._lookups) <= limit:
            return True
        return sum(other.phase in (Phase.LOOKING, Phase.PROMISED) for other in self._lookups.values()) < limit

    def _waits_until_s(self, lookup: _Lookup) -> float:
        """The deadline runs from the service's last sign of life; patience ends all the same."""
        last_sign_s = max(lookup.asked_s, self._last_answer_s)
        return min(last_sign_s + self._options.deadline_s, lookup.asked_s + self._options.patience_s)

    def _boundary_tokens(self, lookup: _Lookup) -> int:
        return lookup.stored.chunk_count * self._form.chunk_tokens

    def _look(self, now_s: float, request_id: str, lookup: _Lookup) -> StartMatch:
        assert not lookup.lease_id
        self._attempts += 1
        lookup.phase = Phase.LOOKING
        lookup.attempt = self._attempts
        lookup.asked_s = now_s
        lookup.stored = NOTHING_STORED
        self.counters["lookups"] += 1
        return StartMatch(request_id, lookup.attempt)

    def _release(self, lookup: _Lookup) -> list[Effect]:
        lease_id, lookup.lease_id = lookup.lease_id, ""
        self._leases_changed |= bool(lease_id)
        return [ReleaseLease(lease_id)] if lease_id else []
