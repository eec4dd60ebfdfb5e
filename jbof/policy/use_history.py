"""When was a chunk last used, how often, at what pace: a table of bounded size for chunks held or not.

A bucket of :data:`WAYS` entries for each hash; a new key takes the place of the entry used longest ago, of a chunk that
is not held if there is one. An entry is ten bytes. What was displaced is unknown again, which is what "used before all
that is remembered" means to a policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.policy.chain import Floats, Indexes, Keys, Mask

WAYS = 4
TICK_S = 0.1
BYTES_PER_ENTRY = 10
MAX_USES = 127
_RESIDENT = 0x80
EMPTY_CLASS = 0xFF
_PACE_STEPS = 16.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What is remembered of some keys; rows of unknown keys hold the entry that they displace."""

    slots: Indexes
    known: Mask
    last_use_s: Floats
    uses: npt.NDArray[np.int64]
    pace: Floats
    classes: Bytes

    def of(self, rows: Mask) -> Entries:
        return Entries(
            self.slots[rows],
            self.known[rows],
            self.last_use_s[rows],
            self.uses[rows],
            self.pace[rows],
            self.classes[rows],
        )


class UseHistory:
    """``entry_count`` is rounded up to a power of two of buckets. Times are seconds from 0, up to 13 years."""

    def __init__(self, entry_count: int) -> None:
        assert entry_count > 0, entry_count
        self._bucket_bits = max(0, (-(-entry_count // WAYS) - 1).bit_length())
        count = WAYS << self._bucket_bits
        self._fingerprints = np.zeros(count, np.uint16)
        self._last_ticks = np.zeros(count, np.uint32)
        self._uses = np.zeros(count, np.uint8)
        self._paces = np.zeros(count, np.uint8)
        self._classes = np.full(count, EMPTY_CLASS, np.uint8)
        self._is_taken = np.zeros(count, np.bool_)  # scratch: all False between calls

    def __len__(self) -> int:
        return len(self._classes)

    def find(self, keys: Keys) -> tuple[Indexes, Mask]:
        """For each key the slot of its entry, and whether it has one; without one the slot is its bucket's first."""
        ways = self._bucket(keys)[:, None] + np.arange(WAYS)
        same = (self._fingerprints[ways] == _fingerprints(keys)[:, None]) & (self._classes[ways] != EMPTY_CLASS)
        slots: Indexes = ways[:, 0] + same.argmax(axis=1)
        return slots, same.any(axis=1)

    def places(self, keys: Keys, taken: Indexes) -> Indexes:
        """Slots for new keys: empty, or used longest ago (those that are not resident first), and none of ``taken``.

        Each key gets another slot while its bucket has enough of them; what is left over shares the last.
        """
        buckets = self._bucket(keys)
        ways = buckets[:, None] + np.arange(WAYS)
        self._is_taken[taken] = True
        last_ticks = np.where(self._classes[ways] != EMPTY_CLASS, self._last_ticks[ways].astype(np.int64), -1)
        last_ticks[(self._uses[ways] & _RESIDENT) != 0] += 1 << 32
        last_ticks[self._is_taken[ways]] = 1 << 34
        self._is_taken[taken] = False
        order = np.argsort(last_ticks, axis=1, kind="stable")
        way = order[np.arange(len(keys)), np.minimum(_rank_among_equals(buckets), WAYS - 1)]
        slots: Indexes = buckets + way
        return slots

    def _bucket(self, keys: Keys) -> Indexes:
        buckets: Indexes = (keys & np.uint64((1 << self._bucket_bits) - 1)).astype(np.intp) * WAYS
        return buckets

    def entries(self, slots: Indexes, known: Mask) -> Entries:
        uses = self._uses[slots]
        return Entries(
            slots,
            known,
            self._last_ticks[slots].astype(np.float64) * TICK_S,
            (uses & MAX_USES).astype(np.int64),
            self._paces[slots].astype(np.float64) / _PACE_STEPS,
            self._classes[slots],
        )

    def put(self, keys: Keys, found: Entries, now_s: float, uses: Indexes, pace: Floats, classes: Bytes) -> None:
        """Remember a use at ``now_s`` of ``keys``, whose entries ``found`` were; whether they are resident stays."""
        slots = found.slots
        self._fingerprints[slots] = _fingerprints(keys)
        self._last_ticks[slots] = round(now_s / TICK_S)
        resident = np.where(found.known, self._uses[slots] & _RESIDENT, 0)
        self._uses[slots] = np.minimum(uses, MAX_USES) | resident
        self._paces[slots] = np.clip(pace * _PACE_STEPS, 0, 255)
        self._classes[slots] = classes

    def set_resident(self, keys: Keys, *, resident: bool) -> None:
        """The medium holds these chunks from now on, or no more. Unknown keys are passed over."""
        slots, known = self.find(keys)
        slots = slots[known]
        kept = self._uses[slots] & MAX_USES
        self._uses[slots] = kept | _RESIDENT if resident else kept

    def is_resident(self, keys: Keys) -> Mask:
        """Unknown keys are not."""
        slots, known = self.find(keys)
        resident: Mask = known & ((self._uses[slots] & _RESIDENT) != 0)
        return resident

    def sample(self, count: int) -> tuple[Bytes, Floats, Mask]:
        """Class, time of last use and residence of the remembered among the first ``count`` entries.

        Keys are uniform, so these are a fair sample of all.
        """
        used = self._classes[:count] != EMPTY_CLASS
        resident = (self._uses[:count] & _RESIDENT) != 0
        return self._classes[:count][used], self._last_ticks[:count][used] * TICK_S, resident[used]


def _fingerprints(keys: Keys) -> npt.NDArray[np.uint16]:
    return (keys >> np.uint64(48)).astype(np.uint16)


def _rank_among_equals(values: Indexes) -> Indexes:
    """How many equal values come before each one."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(values) else order
    lengths = np.diff(np.append(starts, len(values)))
    ranks = np.empty(len(values), np.intp)
    ranks[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return ranks
