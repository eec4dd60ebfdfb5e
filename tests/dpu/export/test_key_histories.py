"""Random histories of keys that are replaced: see ``key_world``. A failure names its seed.

What must hold at any time:

- A live host that reports has, after each answer, the key that its target asks for, as far as the service knows it: so
  it is locked out for one heartbeat at most.
- What a target asks for changes by the service's steps only, never by a file, never back to a key of before, and to
  nothing that a power failure could undo. A host is told nothing that its target never asked for.
- One that is fenced is not let in again, and nothing is written for it.
- A host has two keys at most, and one when all has become quiet. No key is logged.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from meshfusion.dpu.export.plan import TargetKind
from tests.dpu.export.key_histories import HistoryFailed, live, live_once_replaced
from tests.dpu.export.key_mutants import MUTANTS
from tests.dpu.export.key_world import Parts

HISTORIES = 120
MANY = 8000
TO_FIND_A_BUG = 100
HAPPENED = ("told a new key", "connected", "attached again", "asked for", "killed", "started again", "power lost")


def test_keys_live_through_everything() -> None:
    told = sum((live(seed) for seed in range(HISTORIES)), Counter[str]())
    assert all(told[what] >= HISTORIES // 4 for what in HAPPENED), told


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_keys_live_through_everything_many_times() -> None:
    for seed in range(HISTORIES, HISTORIES + MANY):
        live(seed)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    with pytest.raises(HistoryFailed, match=r"^seed \d+: AssertionError"):
        _live_many(MUTANTS[name])


def _live_many(parts: Parts) -> None:
    for seed in range(TO_FIND_A_BUG):
        live(seed, parts)


@pytest.mark.parametrize("with_power", [False, True])
@pytest.mark.parametrize("kind", TargetKind)
def test_a_service_may_end_between_any_two_things_that_it_does(kind: TargetKind, with_power: bool) -> None:
    """Five of them with the file, two with the target, two with the former file."""
    numbers = itertools.count(1)
    assert next(number for number in numbers if not live_once_replaced(kind, number, with_power=with_power)) == 10


@pytest.mark.parametrize(
    "name", ["forgets at a restart that a key was replaced", "takes over a key that is not durable"]
)
def test_a_planted_bug_shows_when_the_service_ends_at_the_wrong_time(name: str) -> None:
    with pytest.raises(HistoryFailed):
        _end_anywhere(MUTANTS[name])


def _end_anywhere(parts: Parts) -> None:
    for number in range(1, 10):
        live_once_replaced(TargetKind.SPDK, number, with_power=False, parts=parts)
