"""The service keeps its rules under crashes, late writes, silence, failing transactions, requests that are lost or come
twice, clocks that leap, targets that restart and owners that are replaced; planted bugs are found.

A failure names its seed; ``python -m tests.sim.run --seed N`` or ``--sim-seed N`` brings it back.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.sim.mutants import MUTANTS, MUTANTS_WITH_DRIVES
from tests.sim.mutants_around import MUTANTS_AROUND
from tests.sim.mutants_of_drives import MUTANTS_OF_DRIVES
from tests.sim.run import STEPS, SimulationFailed, run
from tests.sim.service import Rules

BATCHES, WORLDS_PER_BATCH = 8, 45  # 1 080 000 steps with those of three drives
NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS = 100_000, 4000  # 10 million steps with those of three drives
MUTANT_WORLDS = 300
RARE_WORLDS = 200
MUST_HAPPEN = (
    "abort sent twice",
    "attach sent twice",
    "bundles accepted",
    "bundles refused",
    "chunks matched",
    "chunks moved",
    "chunks read",
    "commit sent twice",
    "commits accepted",
    "commits refused",
    "cut off",
    "detach sent twice",
    "fenced refused",
    "heartbeat sent twice",
    "host crashes",
    "late writes",
    "leaps of the service's clock",
    "match sent twice",
    "not let in by the target",
    "openings within a budget",
    "power losses",
    "reclaims",
    "refused as stale",
    "refused for an old version",
    "release sent twice",
    "requests lost",
    "reserve busy",
    "reserve declined",
    "reserve exists",
    "reserve granted",
    "reserve no_space",
    "reserve sent twice",
    "rounds of exports with a problem",
    "served beside a silent host",
    "service crashes",
    "silences",
    "suspensions of the service",
    "target restarts",
    "writes in doubt",
)
WITH_ONE_DRIVE = ("changes of the owner", "several groups matched", "who was replaced was asked")
WITH_DRIVES = (
    "drives added",
    "drives back",
    "drives lost",
    "drives proven by a host",
    "drives removed",
    "drives taken out of the target",
    "drives used otherwise",
    "hosts told of other drives",
    "lives with a drive that is only read",
    "lives without a drive",
)
RARE = (  # not in each batch
    "drop sent twice",
    "lower boundaries for the pins",
    "openings of who was replaced, refused",
    "woke after a minute with a write in the target",
    "writes sent again to a target",
)


def _run_all(first_seed: int, worlds: int, rules: Rules | None = None, *, drives: int = 1) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + worlds):
        seen += run(seed, STEPS, rules, drives=drives)
    return seen


@pytest.mark.parametrize(
    ("batch", "drives"), [*((i, 1) for i in range(BATCHES)), *((i, 3) for i in range(BATCHES // 2))]
)
def test_rules_hold_in_every_world(
    batch: int, drives: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = request.config.getoption("--sim-seed", default=None)
    if replay is not None:
        run(replay, drives=drives)
        return
    began_s = time.monotonic()
    seen = _run_all(batch * WORLDS_PER_BATCH, WORLDS_PER_BATCH, drives=drives)
    steps_per_s = WORLDS_PER_BATCH * STEPS / (time.monotonic() - began_s)
    with capsys.disabled():
        print(f" {steps_per_s:.0f} steps/s", end="")
    missed = [name for name in MUST_HAPPEN + (WITH_DRIVES if drives > 1 else WITH_ONE_DRIVE) if not seen[name]]
    assert missed == [], "the simulation no longer reaches these"


def test_what_is_rare_happens_too() -> None:
    seen: Counter[str] = Counter()
    for seed in range(RARE_WORLDS):
        seen += run(seed)
        if all(seen[name] for name in RARE):
            return
    assert [name for name in RARE if not seen[name]] == [], "the simulation no longer reaches these"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_rules_hold_in_many_worlds() -> None:
    _run_all(NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS)
    _run_all(NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS // 3, drives=3)


def test_a_seed_is_a_world() -> None:
    assert run(11) == run(11)
    assert run(11) != run(12)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--seed"):
        _run_all(0, MUTANT_WORLDS, MUTANTS[name])


@pytest.mark.parametrize("name", MUTANTS_AROUND)
def test_a_bug_planted_around_the_store_is_found(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--seed"):
        _run_all(0, MUTANT_WORLDS, MUTANTS_AROUND[name])


@pytest.mark.parametrize("name", MUTANTS_OF_DRIVES)
def test_a_bug_planted_in_how_drives_come_and_go_is_found(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--drives 3"):
        _run_all(0, MUTANT_WORLDS, MUTANTS_OF_DRIVES[name], drives=3)


@pytest.mark.parametrize("name", MUTANTS_WITH_DRIVES)
def test_a_planted_bug_is_found_with_several_drives(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--drives 3"):
        _run_all(0, MUTANT_WORLDS, MUTANTS_WITH_DRIVES[name], drives=3)
