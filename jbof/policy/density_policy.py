"""The default policy: chunks compete for room by learned uses per byte and second (docs/medium-policies.md).

Two prices rule it. The price of **room** is the density of the least valuable chunks held: what is expected to yield
less is let go. The price of a **write** is a number of uses: a chunk is written when it is expected to yield that many
beyond what its room costs. It rises from :attr:`PolicySettings.write_price` to one use as a drive's budget runs out.

Lookups and writes only look up prices and tables; these are made anew in :meth:`DensityPolicy.refresh_if_due`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.policy.chain import Chain, Floats, Indexes, Keys, Mask
from meshfusion.jbof.policy.medium_policy import Admissions, Refusal, SegmentStats
from meshfusion.jbof.policy.reuse_classes import (
    INHERITED,
    PARTIAL,
    at_least_followers,
    class_of_new,
    classify,
    pace_after,
)  # fmt: skip
from meshfusion.jbof.policy.reuse_model import MAX_AGE_S, ReuseModel, age_bins
from meshfusion.jbof.policy.use_history import EMPTY_CLASS, Bytes, Entries, UseHistory

LEAF_DISCOUNT = 1e-3
_LEAF_SCALE = 64.0
_LIFETIME_BOUNDS_S = np.array([256.0, 1024.0])
# What reclaiming segments costs is learned from them; while none is reclaimed, a price that is too high has to heal.
_PRICE_STEP = 0.05
_PRICE_FADING = 0.95
# What was learned fades by a fiftieth for so many requests, or later if few of their chunks are learned from.
_FADING = 0.98
_FADING_MATCHES = 128
_FADING_CHUNKS = 3072
_LEAST_HISTORY = 1 << 17
_LEAST_REFRESH_CHUNKS = 8192
_LEAST_REFRESH_S = 1.0
LIFETIME_COUNT = len(_LIFETIME_BOUNDS_S) + 1


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """:meth:`for_pool` makes those that fit a pool.

    ``history_entries`` for each KV group, ten bytes each: chunks of some hours' traffic, at least twice the pool.
    ``sample_entries``: how many of them the model learns from. The tables are due to be made anew after
    ``refresh_matches`` requests or ``refresh_chunks`` chunks that these asked for. ``attention_tokens``: the context
    length at which a token's attention costs as much as the rest of the model; None when unknown: then all tokens cost
    the same.
    """

    history_entries: int = 1 << 20
    sample_entries: int = 1 << 17
    write_price: float = 0.08
    room_price_quantile: float = 0.02
    refresh_matches: int = 128
    refresh_chunks: int = 1 << 16
    attention_tokens: float | None = None

    @classmethod
    def for_pool(cls, chunk_count: int, attention_tokens: float | None = None) -> PolicySettings:
        """``chunk_count``: how many chunks fit into the pool, about."""
        assert chunk_count > 0, chunk_count
        return cls(
            history_entries=max(_LEAST_HISTORY, 2 * chunk_count),
            refresh_chunks=max(_LEAST_REFRESH_CHUNKS, chunk_count // 8),
            attention_tokens=attention_tokens,
        )


@dataclass(slots=True)
class _Observed:
    """Since the tables were made. ``sampled``: chunks that the model learned from."""

    matches: int = 0
    chunks: int = 0
    sampled: int = 0
    is_reclaimed: bool = False


@dataclass(slots=True)
class _Group:
    chunk_tokens: int
    chunk_bytes: int
    history: UseHistory
    model: ReuseModel = field(default_factory=ReuseModel)

    @property
    def tokens_per_byte(self) -> float:
        return self.chunk_tokens / self.chunk_bytes


class DensityPolicy:
    """See :class:`~meshfusion.jbof.policy.medium_policy.MediumPolicy`."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()
        self._groups: dict[int, _Group] = {}
        self._start_s: float | None = None
        self._now_s = MAX_AGE_S  # so that what is held at the start may be that old
        self._refreshed_s = MAX_AGE_S
        self._matches = 0
        self._observed = _Observed()
        self._has_dropped = False
        self._segment_price = 0.0
        self.room_price = 0.0
        """Tokens per byte and second that the least valuable chunks held are expected to save."""

    # ---- observing -----------------------------------------------------------------------------------------------

    def on_match(self, chain: Chain, now_s: float) -> None:
        now_s = self._advance(now_s)
        if len(chain.keys) == 0:
            return
        group = self._group(chain)
        history = group.history
        slots, known = history.find(chain.keys)
        slots[~known] = history.places(chain.keys[~known], slots[known])
        found = history.entries(slots, known)
        self._learn(group, found, now_s)
        gaps_s = np.where(known, np.maximum(now_s - found.last_use_s, 0.0), 0.0)
        uses = np.where(known, found.uses + 1, 1)
        pace = pace_after(uses, found.pace, gaps_s)
        known_count = int(np.argmin(known)) if not known.all() else len(known)
        last = max(known_count - 1, 0)
        new_class = class_of_new(
            chain.tokens,
            chain.skipped + len(known),
            chain.skipped + known_count,
            int(found.uses[last]),
            float(gaps_s[last]),
        )
        classes = classify(uses, pace, new_class, chain.whole_count)
        classes = at_least_followers(classes, group.model.gain[:, 0], chain.whole_count)
        history.put(chain.keys, found, now_s, uses, pace, classes)
        self._matches += 1
        self._observed.matches += 1
        self._observed.chunks += len(chain.keys)

    def on_computed(self, chain: Chain, now_s: float) -> None:
        now_s = self._advance(now_s)
        history = self._group(chain).history
        slots, known = history.find(chain.keys)
        if known.all():
            return
        slots[~known] = history.places(chain.keys[~known], slots[known])
        found = history.entries(slots, known)
        before = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
        first = class_of_new(chain.tokens, len(known), 0, 0, 0.0)
        classes = np.where(before >= 0, found.classes[before], first).astype(np.uint8)
        new = found.of(~known)
        once = np.ones(len(new.slots), np.int64)
        history.put(chain.keys[~known], new, now_s, once, new.pace * 0.0, classes[~known])

    def is_held(self, group: int, keys: Keys) -> Mask:
        if group not in self._groups:
            return np.zeros(len(keys), np.bool_)
        return self._groups[group].history.is_resident(keys)

    def refresh_if_due(self, now_s: float) -> None:
        now_s = self._advance(now_s)
        if self._is_due(now_s):
            self._refresh(now_s)
            self._observed = _Observed()

    def _is_due(self, now_s: float) -> bool:
        observed, settings = self._observed, self.settings
        if self._matches < settings.refresh_matches:  # at first there is most to learn
            return 0 < observed.matches >= self._matches - observed.matches
        is_enough = observed.matches >= settings.refresh_matches or observed.chunks >= settings.refresh_chunks
        return is_enough and now_s - self._refreshed_s >= _LEAST_REFRESH_S

    def _learn(self, group: _Group, found: Entries, now_s: float) -> None:
        """Uses of sampled chunks, and how long those that they were, or that they displace, had been waiting."""
        is_in_sample = found.slots < self.settings.sample_entries
        self._observed.sampled += int(is_in_sample.sum())
        sampled = is_in_sample & (found.classes != EMPTY_CLASS)
        if not sampled.any():
            return
        classes, last_s = found.classes[sampled], found.last_use_s[sampled]
        seen_s = np.maximum(last_s, self._refreshed_s)
        group.model.exposed(classes, seen_s - last_s, np.maximum(now_s, seen_s) - last_s)
        again = found.known[sampled]
        group.model.reused(classes[again], np.maximum(now_s - last_s[again], 0.0))

    def _refresh(self, now_s: float) -> None:
        held: list[Floats] = []
        for group in self._groups.values():
            classes, last_s, resident = group.history.sample(self.settings.sample_entries)
            seen_s = np.maximum(last_s, self._refreshed_s)
            group.model.exposed(classes, seen_s - last_s, np.maximum(now_s, seen_s) - last_s)
            held.append(self._density(group, classes[resident], now_s - last_s[resident]))
        densities = np.concatenate(held)
        if self._has_dropped and len(densities):
            chunk_price = float(np.quantile(densities, self.settings.room_price_quantile))
            self.room_price = max(chunk_price, self._segment_price)
        if not self._observed.is_reclaimed:
            self._segment_price *= _PRICE_FADING
        fading = _FADING ** min(self._observed.matches / _FADING_MATCHES, self._observed.sampled / _FADING_CHUNKS)
        for group in self._groups.values():
            group.model.refresh(self.room_price / group.tokens_per_byte, fading)
        self._refreshed_s = now_s

    # ---- writing -------------------------------------------------------------------------------------------------

    def admit(
        self, chain: Chain, offered: Indexes, now_s: float, budget_level: float = 1.0, room_density: float = 0.0
    ) -> Admissions:
        assert 0.0 <= budget_level <= 1.0, budget_level
        self._advance(now_s)
        group = self._group(chain)
        slots, known = group.history.find(chain.keys)
        entries = group.history.entries(slots, known)
        classes = np.where(known, entries.classes, PARTIAL).astype(np.uint8)
        is_gain = group.model.gain[classes, 0] >= self.write_price(budget_level)
        worth = self._density(group, classes, np.zeros(len(classes)))
        is_gain &= worth * self._by_position(group, chain.skipped + np.arange(len(classes))) > room_density
        is_offered = np.zeros(len(known), np.bool_)
        is_offered[offered] = True
        reachable = np.logical_and.accumulate(is_gain | ~is_offered)
        refusals = np.where(reachable, Refusal.NONE, np.where(is_gain, Refusal.ANCESTOR, Refusal.GAIN))
        lifetimes = np.searchsorted(_LIFETIME_BOUNDS_S, group.model.stay_s[classes], side="right")
        return Admissions(refusals[offered].astype(np.int8), lifetimes[offered].astype(np.int8))

    def write_price(self, budget_level: float) -> float:
        """Uses that a write must yield: the setting while half of the budget or more is left, one use at its end."""
        base = self.settings.write_price
        return base + (1.0 - base) * max(0.0, 1.0 - 2.0 * budget_level)

    def on_stored(self, group: int, keys: Keys) -> None:
        if group in self._groups:
            self._remember_held(self._groups[group], keys, self._now_s)

    def on_found(self, group: int, keys: Keys, chunk_tokens: int, chunk_bytes: int, age_s: float, now_s: float) -> None:
        now_s = self._advance(now_s)
        state = self._shaped(group, chunk_tokens, chunk_bytes)
        self._remember_held(state, keys, now_s - min(max(age_s, 0.0), MAX_AGE_S))

    def _remember_held(self, group: _Group, keys: Keys, last_use_s: float) -> None:
        """Chunks whose uses are not known are a class of their own, whose chances are learned like others'."""
        slots, known = group.history.find(keys)
        if not known.all():
            new = keys[~known]
            found = group.history.entries(group.history.places(new, slots[known]), np.zeros(len(new), np.bool_))
            once, inherited = np.ones(len(new), np.intp), np.full(len(new), INHERITED, np.uint8)
            group.history.put(new, found, last_use_s, once, np.zeros(len(new)), inherited)
        group.history.set_resident(keys, resident=True)

    def on_dropped(self, group: int, keys: Keys) -> None:
        self._has_dropped = True
        if group in self._groups:
            self._groups[group].history.set_resident(keys, resident=False)

    # ---- reclaiming ----------------------------------------------------------------------------------------------

    def densities(self, group: int, keys: Keys, positions: Indexes, now_s: float) -> Floats:
        now_s = self._advance(now_s)
        if group not in self._groups:
            return np.zeros(len(keys))
        state = self._groups[group]
        slots, known = state.history.find(keys)
        entries = state.history.entries(slots, known)
        classes = np.where(known, entries.classes, 0).astype(np.uint8)
        density = self._density(state, classes, np.where(known, now_s - entries.last_use_s, MAX_AGE_S))
        return np.where(known, density * self._by_position(state, positions), 0.0)

    def victim(self, candidates: Sequence[SegmentStats]) -> SegmentStats:
        assert candidates, "nothing to choose from"
        best = min(candidates, key=lambda stats: (stats.density, stats.opened_seq))
        self._segment_price += _PRICE_STEP * (best.density - self._segment_price)
        self._observed.is_reclaimed = True
        return best

    def keep(self, densities: Floats, budget_chunks: int) -> Mask:
        kept: Mask = densities > self.room_price
        if budget_chunks < densities.shape[-1]:
            order = np.argsort(-densities, axis=-1, kind="stable")
            ranks = np.empty_like(order)
            np.put_along_axis(ranks, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
            kept &= ranks < budget_chunks
        return kept

    # ---- inside --------------------------------------------------------------------------------------------------

    def _density(self, group: _Group, classes: Bytes, ages_s: npt.NDArray[np.float64]) -> Floats:
        density: Floats = group.model.index[classes, age_bins(ages_s)] * group.tokens_per_byte
        return density

    def _by_position(self, group: _Group, positions: Indexes) -> Floats:
        factor: Floats = 1.0 - LEAF_DISCOUNT * positions / (positions + _LEAF_SCALE)
        if self.settings.attention_tokens is not None:
            factor *= 1.0 + positions * group.chunk_tokens / self.settings.attention_tokens
        return factor

    def _group(self, chain: Chain) -> _Group:
        return self._shaped(chain.group, chain.chunk_tokens, chain.chunk_bytes)

    def _shaped(self, group: int, chunk_tokens: int, chunk_bytes: int) -> _Group:
        found = self._groups.get(group)
        if found is None:
            found = _Group(chunk_tokens, chunk_bytes, UseHistory(self.settings.history_entries))
            self._groups[group] = found
        assert (found.chunk_tokens, found.chunk_bytes) == (chunk_tokens, chunk_bytes), group
        return found

    def _advance(self, now_s: float) -> float:
        """Seconds from ``MAX_AGE_S`` before the first call; never less than before."""
        if self._start_s is None:
            self._start_s = now_s - MAX_AGE_S
        self._now_s = max(self._now_s, now_s - self._start_s)
        return self._now_s
