"""Which chunks behave alike: by what a KV cache knows of a chunk and a disk cache does not.

A chunk used for the first time is told apart by how its prompt grew: is the prompt new, does it branch off early from
what was seen before, or does it extend a conversation (then: how many turns, at what pace)? A chunk used again by how
often it was used and at what pace (a moving mean of the logarithm of the time between uses).
"""

from __future__ import annotations

import numpy as np

from meshfusion.jbof.policy.chain import Floats, Indexes
from meshfusion.jbof.policy.use_history import Bytes

LENGTHS = 8
TURNS = 3
PACES = 6
USES = 6

FRESH = 0
BRANCH = FRESH + LENGTHS
GROWTH = BRANCH + LENGTHS
USED = GROWTH + PACES * TURNS
PARTIAL = USED + USES * PACES
INHERITED = PARTIAL + 1
"""Chunks found on the medium whose uses nobody remembers."""
CLASS_COUNT = INHERITED + 1

_FIRST_LENGTH_TOKENS = 512  # the shortest prompts; each further class is twice as long
_FIRST_PACE_LOG2_S = 4.0  # a use every 16 s or faster; each further class is half as fast
_PACE_MEMORY = 0.5
_USE_BOUNDS = np.array([3, 4, 6, 10, 21])  # uses at which a class of used chunks ends


def family_of_classes() -> Indexes:
    """For each class the family whose behaviour it is assumed to have until its own is known."""
    return np.array(
        [0] * LENGTHS
        + [1] * LENGTHS
        + [2] * (PACES * TURNS)
        + [3 + use for use in range(USES) for _ in range(PACES)]
        + [3 + USES]
        + [4 + USES],
        np.intp,
    )


def next_classes() -> Indexes:
    """For each class the one that its chunks are in after their next use, at an unchanged pace."""
    after_first = [USED + PACES // 2] * (2 * LENGTHS)
    after_growth = [USED + pace for pace in range(PACES) for _ in range(TURNS)]
    after_used = [USED + min(use + 1, USES - 1) * PACES + pace for use in range(USES) for pace in range(PACES)]
    return np.array([*after_first, *after_growth, *after_used, PARTIAL, USED + PACES // 2], np.intp)


def pace_after(uses: Indexes, pace_log2_s: Floats, gap_s: Floats) -> Floats:
    """The pace, log2 of seconds between uses, after a use ``gap_s`` after the one before; ``uses`` counts this one."""
    gap_log2_s = np.log2(np.maximum(gap_s, 1.0))
    return np.where(uses <= 2, gap_log2_s, pace_log2_s + _PACE_MEMORY * (gap_log2_s - pace_log2_s))


def pace_bucket(pace_log2_s: Floats) -> Indexes:
    return np.clip(np.ceil(pace_log2_s - _FIRST_PACE_LOG2_S), 0, PACES - 1).astype(np.intp)


def classes_of_used(uses: Indexes, pace_log2_s: Floats) -> Indexes:
    """Classes of chunks that were used before; ``uses`` counts this use, so it is 2 or more."""
    return USED + np.searchsorted(_USE_BOUNDS, uses, side="right") * PACES + pace_bucket(pace_log2_s)


def class_of_new(tokens: int, chunk_count: int, known_count: int, turns: int, gap_s: float) -> int:
    """Class of the chunks of a prompt that nobody asked for before.

    ``tokens``, ``chunk_count``: of the whole prompt. ``known_count``: its chunks, from the first, that were seen
    before. ``turns``, ``gap_s``: uses of the last of these before this one, and the time since the latest.
    """
    length = min(max(tokens // _FIRST_LENGTH_TOKENS, 1).bit_length() - 1, LENGTHS - 1)
    if known_count <= 1:  # one chunk is a system prompt, or less
        return FRESH + length
    if known_count * 2 < chunk_count:
        return BRANCH + length
    pace = int(pace_bucket(np.log2(np.maximum(np.array([gap_s]), 1.0)))[0])
    return GROWTH + pace * TURNS + min(turns, TURNS) - 1


def classify(uses: Indexes, pace_log2_s: Floats, new_class: int, whole_count: int) -> Bytes:
    """The class of each chunk of a chain; ``uses`` counts this use."""
    classes = np.where(uses > 1, classes_of_used(uses, pace_log2_s), new_class)
    classes[whole_count:] = PARTIAL
    return classes.astype(np.uint8)


def at_least_followers(classes: Bytes, gains: Floats, whole_count: int) -> Bytes:
    """Each whole chunk's class, or that of the follower in its chain that is worth more, if there is one.

    A follower cannot be loaded without what comes before it, so a chunk is worth at least what its followers are.
    ``gains``: by class.
    """
    if whole_count == 0:
        return classes
    backwards = classes[:whole_count][::-1]
    gain = gains[backwards]
    is_best = gain >= np.maximum.accumulate(gain)
    best = np.maximum.accumulate(np.where(is_best, np.arange(whole_count), 0))
    return np.concatenate([backwards[best][::-1], classes[whole_count:]])
