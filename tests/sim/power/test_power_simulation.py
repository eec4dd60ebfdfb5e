"""Power cuts at every write of random histories, rot, and planted bugs, each of which must be found.

A failure names its seed; ``python -m tests.sim.power.run --seed N`` brings it back.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.power.drive import Faults
from tests.sim.power.mutants import MUTANTS, RECOVERY_MUTANTS
from tests.sim.power.run import NO_FAULTS, ROT, SimulationFailed, run
from tests.sim.power.world import Rules

BATCHES, HISTORIES_PER_BATCH = 4, 25
CUTS_MIN = 10_000  # in all batches
MUTANT_HISTORIES = 120
NIGHTLY_FIRST_SEED, NIGHTLY_HISTORIES = 100_000, 4000
MUST_HAPPEN = (
    "aborts",
    "chunks found again",
    "commits",
    "counted deallocations_unsupported",
    "counted segments_deallocated",
    "drops",
    "extents refused",
    "lives after a rebuild",
    "loads",
    "reserve no_space",
    "restarts after a cut",
    "restarts after a kill",
    "segments scanned",
    "segments with a summary",
    "summaries",
)


def run_all(first_seed: int, count: int, rules: Rules | None = None, faults: Faults = NO_FAULTS) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        seen += run(seed, rules, faults=faults)
    return seen


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_cut_at_every_write(batch: int) -> None:
    seen = run_all(batch * HISTORIES_PER_BATCH, HISTORIES_PER_BATCH)
    assert [name for name in MUST_HAPPEN if not seen[name]] == [], "the simulation no longer reaches these"
    assert seen["cuts"] * BATCHES >= CUTS_MIN


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_histories() -> None:
    run_all(NIGHTLY_FIRST_SEED, NIGHTLY_HISTORIES)


def test_rot_misdirected_and_lost_writes_are_never_served() -> None:
    seen = run_all(0, 30, faults=ROT)
    assert min(seen["found by their digests"], seen["extents refused"], seen["loads"]) > 0
    assert run_all(0, 30, faults=Faults(lost=0.03, misdirected=0.03))["dropped for their digests"] > 0


def test_a_seed_is_a_history() -> None:
    assert run(11) == run(11)
    assert run(11) != run(12)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--seed"):
        run_all(0, MUTANT_HISTORIES, MUTANTS[name])


@pytest.mark.parametrize("name", RECOVERY_MUTANTS)
def test_a_planted_bug_of_the_recovery_is_found(name: str) -> None:
    with RECOVERY_MUTANTS[name](), pytest.raises(SimulationFailed, match="--seed"):
        run_all(0, MUTANT_HISTORIES)
