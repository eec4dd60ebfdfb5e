"""How likely is a chunk's next use, and how soon: learned for each class from what was observed, and what it is worth.

For each class the rate of reuse by age (time since the last use) is events over exposure: uses that came at that age,
over the time that chunks were seen to be of that age, used again or not. Both fade, so the model follows the workload.
From these rates comes an **index**, the most uses for each second of room that a chunk can yield if it is dropped at
the right age (the Gittins index of a reward process), and a **gain**, the uses it yields beyond what the room could
yield otherwise. Uses after the next one are counted at :data:`CONTINUATION`.
"""

from __future__ import annotations

import numpy as np

from meshfusion.jbof.policy.chain import Floats, Indexes
from meshfusion.jbof.policy.reuse_classes import CLASS_COUNT, INHERITED, family_of_classes, next_classes
from meshfusion.jbof.policy.use_history import Bytes

AGES = 28
AGE_EDGES_S = np.concatenate([[0.0], 2.0 ** (np.arange(AGES) / 2)])  # [0, 1, 1.4, 2, ... 11585]
MAX_AGE_S = float(AGE_EDGES_S[-1])
PRIOR_EVENTS = 30.0
CONTINUATION = 0.7
FIRST_EVENTS = 3.0
_WIDTHS_S = np.diff(AGE_EDGES_S)
# Before anything is known: the older the less likely, as if least-recently-used were right.
_FIRST_RATES = 0.1 / np.maximum(AGE_EDGES_S[:-1] + _WIDTHS_S / 2, 1.0)


class ReuseModel:
    """Rates of reuse by class and age, and the tables made of them.

    ``index``, ``gain``: shape (classes, ages), uses per second, and uses. ``stay_s``: after how long without a use a
    chunk of a class is best dropped, shape (classes,).
    """

    def __init__(self) -> None:
        self._events = np.zeros((CLASS_COUNT, AGES))
        self._exposure_s = np.zeros((CLASS_COUNT, AGES))
        self._families = family_of_classes()
        self._next = next_classes()
        self.index = np.zeros((CLASS_COUNT, AGES))
        self.gain = np.ones((CLASS_COUNT, AGES))
        self.stay_s = np.full(CLASS_COUNT, MAX_AGE_S)
        self.refresh(0.0)

    def reused(self, classes: Bytes, ages_s: Floats) -> None:
        """Chunks of these classes were used again at these ages."""
        bins = classes.astype(np.intp) * AGES + age_bins(ages_s)
        self._events += np.bincount(bins, minlength=CLASS_COUNT * AGES).reshape(CLASS_COUNT, AGES)

    def exposed(self, classes: Bytes, from_s: Floats, to_s: Floats) -> None:
        """Chunks of these classes were seen to grow from one age to another."""
        self._exposure_s += _time_by_age(classes, to_s) - _time_by_age(classes, from_s)

    def refresh(self, price_per_s: float, fading: float = 1.0) -> None:
        """Make the tables anew, with ``price_per_s`` what a second of a chunk's room yields otherwise; then fade."""
        survival, room_s = _survival(self._rates())
        rewards = 1.0 + CONTINUATION * self.gain[self._next, 0]
        hits = (survival[:, :-1, None] - survival[:, None, :]) * rewards[:, None, None]
        room = room_s[:, None, :] - room_s[:, :-1, None]
        is_later = np.arange(AGES + 1)[None, :] > np.arange(AGES)[:, None]
        self.index = np.where(is_later, hits / np.maximum(room, 1e-9), 0.0).max(axis=2)
        gains = np.where(is_later, hits - price_per_s * room, 0.0)
        self.gain = np.maximum(gains.max(axis=2), 0.0) / np.maximum(survival[:, :-1], 1e-9)
        self.stay_s = AGE_EDGES_S[gains[:, 0, :].argmax(axis=1)]
        self._events *= fading
        self._exposure_s *= fading

    def _rates(self) -> Floats:
        """Uses per second by class and age: a class without data behaves like its family, that like all."""
        known = slice(0, INHERITED)  # the age of what was found at the start is a guess, and says nothing about others
        all_events, all_exposure_s = self._events[known].sum(axis=0), self._exposure_s[known].sum(axis=0)
        base = (all_events + FIRST_EVENTS) / (all_exposure_s + FIRST_EVENTS / _FIRST_RATES)
        families = int(self._families.max()) + 1
        events, exposure_s = np.zeros((families, AGES)), np.zeros((families, AGES))
        np.add.at(events, self._families, self._events)
        np.add.at(exposure_s, self._families, self._exposure_s)
        family = (events + PRIOR_EVENTS) / (exposure_s + PRIOR_EVENTS / base)
        prior = family[self._families]
        rates: Floats = (self._events + PRIOR_EVENTS) / (self._exposure_s + PRIOR_EVENTS / prior)
        return rates


def age_bins(ages_s: Floats) -> Indexes:
    return np.clip(np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1, 0, AGES - 1)


def _survival(rates: Floats) -> tuple[Floats, Floats]:
    """The share not used again by each edge of age, and the mean room-seconds spent until then."""
    hazard = np.cumsum(rates * _WIDTHS_S, axis=1)
    survival = np.concatenate([np.ones((len(rates), 1)), np.exp(-hazard)], axis=1)
    mean = (survival[:, :-1] + survival[:, 1:]) / 2
    room_s = np.concatenate([np.zeros((len(rates), 1)), np.cumsum(mean * _WIDTHS_S, axis=1)], axis=1)
    return survival, room_s


def _time_by_age(classes: Bytes, ages_s: Floats) -> Floats:
    """How long chunks of these classes, grown from age 0 to ``ages_s``, were in each bin of age, summed by class."""
    shape = (CLASS_COUNT, AGES)
    bins = classes.astype(np.intp) * AGES + age_bins(ages_s)
    ages_s = np.minimum(ages_s, MAX_AGE_S)
    counts = np.bincount(bins, minlength=CLASS_COUNT * AGES).reshape(shape)
    sums_s = np.bincount(bins, weights=ages_s, minlength=CLASS_COUNT * AGES).reshape(shape)
    older = counts[:, ::-1].cumsum(axis=1)[:, ::-1] - counts
    within_s: Floats = sums_s - counts * AGE_EDGES_S[:-1] + older * _WIDTHS_S
    return within_s
