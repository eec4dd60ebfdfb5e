"""The store keeps its rules under crashes, late writes, silence and failing transactions; planted bugs are found.

A failure names its seed; ``python -m tests.sim.run --seed N`` or ``--sim-seed N`` brings it back.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.mutants import MUTANTS, MUTANTS_WITH_DRIVES
from tests.sim.run import STEPS, SimulationFailed, run
from tests.sim.service import Rules

BATCHES, WORLDS_PER_BATCH = 8, 20  # 480 000 steps with those of three drives
NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS = 100_000, 1500  # 3 million steps
MUTANT_WORLDS = 150
MUST_HAPPEN = (
    "bundles accepted",
    "bundles refused",
    "chunks matched",
    "chunks moved",
    "chunks read",
    "commits accepted",
    "commits refused",
    "cut off",
    "fenced refused",
    "host crashes",
    "late writes",
    "lower boundaries for the pins",
    "power losses",
    "reclaims",
    "refused as stale",
    "openings within a budget",
    "reserve busy",
    "reserve declined",
    "reserve exists",
    "reserve granted",
    "reserve no_space",
    "service crashes",
    "several groups matched",
    "silences",
    "target restarts",
    "writes in doubt",
)


RARE = ("lower boundaries for the pins",)  # not in each batch
RARE_WITH_DRIVES = ("lower boundaries for the pins", "several groups matched")  # chunks are away too often
MUST_HAPPEN_WITH_DRIVES = (
    *(name for name in MUST_HAPPEN if name not in RARE_WITH_DRIVES),
    "lives without a drive",
    "lives with a drive that is only read",
    "drives back",
    "drives lost",
    "drives used otherwise",
)


def _run_all(first_seed: int, worlds: int, rules: Rules | None = None, *, drives: int = 1) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + worlds):
        seen += run(seed, STEPS, rules, drives=drives)
    return seen


@pytest.mark.parametrize(
    ("batch", "drives"), [*((i, 1) for i in range(BATCHES)), *((i, 3) for i in range(BATCHES // 2))]
)
def test_rules_hold_in_every_world(batch: int, drives: int, request: pytest.FixtureRequest) -> None:
    replay = request.config.getoption("--sim-seed", default=None)
    if replay is not None:
        run(replay, drives=drives)
        return
    seen = _run_all(batch * WORLDS_PER_BATCH, WORLDS_PER_BATCH, drives=drives)
    wanted = MUST_HAPPEN_WITH_DRIVES if drives > 1 else MUST_HAPPEN
    missed = [name for name in wanted if not seen[name] and (batch == 0 or name not in RARE)]
    assert missed == [], "the simulation no longer reaches these"


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


@pytest.mark.parametrize("name", MUTANTS_WITH_DRIVES)
def test_a_planted_bug_is_found_with_several_drives(name: str) -> None:
    with pytest.raises(SimulationFailed, match="--drives 3"):
        _run_all(0, MUTANT_WORLDS, MUTANTS_WITH_DRIVES[name], drives=3)
