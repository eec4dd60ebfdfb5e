"""Power cuts at every write of random histories, rot, and planted bugs, each of which must be found.

A failure names its seed; ``python -m tests.sim.power.run --seed N`` brings it back.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.power.drive import Faults
from tests.sim.power.mutants import DRIVES_MUTANTS, MUTANTS, RECOVERY_MUTANTS, SHARDS_MUTANTS
from tests.sim.power.run import NO_FAULTS, ROT, SimulationFailed, run
from tests.sim.power.world import Rules

BATCHES, HISTORIES_PER_BATCH = 4, 25
DRIVES_BATCHES, DRIVES = 2, 3
CUTS_MIN = 10_000  # in all batches
MUTANT_HISTORIES = 120
NIGHTLY_FIRST_SEED, NIGHTLY_HISTORIES = 100_000, 4000
MUST_HAPPEN = (
    "aborts",
    "chunks of several shards found again",
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
    "shards left out",
    "summaries",
)
MUST_HAPPEN_WITH_DRIVES = (*MUST_HAPPEN, "chunks on several drives", "cuts of one drive", "rebuilds without a drive")


def run_all(
    first_seed: int, count: int, rules: Rules | None = None, faults: Faults = NO_FAULTS, drive_count: int = 1
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        seen += run(seed, rules, faults=faults, drive_count=drive_count)
    return seen


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_cut_at_every_write(batch: int) -> None:
    seen = run_all(batch * HISTORIES_PER_BATCH, HISTORIES_PER_BATCH)
    assert [name for name in MUST_HAPPEN if not seen[name]] == [], "the simulation no longer reaches these"
    assert seen["cuts"] * BATCHES >= CUTS_MIN


@pytest.mark.parametrize("batch", range(DRIVES_BATCHES))
def test_a_cut_of_all_drives_or_of_one(batch: int) -> None:
    seen = run_all(batch * HISTORIES_PER_BATCH, HISTORIES_PER_BATCH, drive_count=DRIVES)
    assert [name for name in MUST_HAPPEN_WITH_DRIVES if not seen[name]] == [], "the simulation no longer reaches these"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drive_count", [1, DRIVES])
def test_many_histories(drive_count: int) -> None:
    run_all(NIGHTLY_FIRST_SEED, NIGHTLY_HISTORIES // drive_count, drive_count=drive_count)


def test_rot_misdirected_and_lost_writes_are_never_served() -> None:
    seen = run_all(0, 30, faults=ROT)
    assert min(seen["found by their digests"], seen["extents refused"], seen["loads"]) > 0
    assert run_all(0, 30, faults=Faults(lost=0.03, misdirected=0.03))["dropped for their digests"] > 0


def test_rot_of_one_of_several_drives_is_never_served() -> None:
    seen = run_all(0, 15, faults=ROT, drive_count=DRIVES)
    assert min(seen["found by their digests"], seen["extents refused"], seen["loads"]) > 0


def test_a_seed_is_a_history() -> None:
    assert run(11) == run(11)
    assert run(11) != run(12)
    assert run(11, drive_count=DRIVES) == run(11, drive_count=DRIVES)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--seed"):
        run_all(0, MUTANT_HISTORIES, MUTANTS[name])


@pytest.mark.parametrize("name", RECOVERY_MUTANTS)
def test_a_planted_bug_of_the_recovery_is_found(name: str) -> None:
    with RECOVERY_MUTANTS[name](), pytest.raises(SimulationFailed, match="--seed"):
        run_all(0, MUTANT_HISTORIES)


@pytest.mark.parametrize("name", DRIVES_MUTANTS)
def test_a_planted_bug_of_several_drives_is_found(name: str) -> None:
    with pytest.raises(SimulationFailed, match=r"--seed [0-9]+ --drives 3"):
        run_all(0, MUTANT_HISTORIES, DRIVES_MUTANTS[name], drive_count=DRIVES)


@pytest.mark.parametrize("drive_count", [1, DRIVES])
@pytest.mark.parametrize("name", SHARDS_MUTANTS)
def test_a_planted_bug_of_shards_is_found(name: str, drive_count: int) -> None:
    with SHARDS_MUTANTS[name](), pytest.raises(SimulationFailed, match="--seed"):
        run_all(0, MUTANT_HISTORIES, drive_count=drive_count)
