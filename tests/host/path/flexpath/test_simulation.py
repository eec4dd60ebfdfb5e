"""FlexPath keeps its rules while paths die, stall, flap, lose, err, and slow down; planted bugs are found.

A failure names its seed; :func:`tests.host.path.flexpath.sim.world.run` and :class:`...throughput.Load` bring it back.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.host.path.flexpath.sim.mutants import MUTANTS
from tests.host.path.flexpath.sim.throughput import KINDS, check_throughput
from tests.host.path.flexpath.sim.world import SimulationFailed, run

BATCHES, WORLDS_PER_BATCH = 2, 20
NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS = 100_000, 2000
MUTANT_WORLDS = 40
MUST_HAPPEN = (
    "access",
    "access errors",
    "attempts on a path that is not optimized",
    "commands failed",
    "connections given up",
    "disable",
    "erring",
    "failed while paths are disabled",
    "flap",
    "in doubt",
    "kill",
    "lossy",
    "path quarantined",
    "path re-entering",
    "path suspect",
    "read TransferDone",
    "read TransferFailed",
    "read TransferInDoubt",
    "reads compared",
    "reads repeated",
    "responses lost",
    "slow",
    "stall",
    "write TransferDone",
    "write TransferFailed",
    "write TransferInDoubt",
    "writes landed late",
    "writes repeated",
)


def _run_all(first_seed: int, worlds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + worlds):
        seen += run(seed)
    return seen


@pytest.mark.parametrize("batch", range(BATCHES))
def test_rules_hold_in_every_world(batch: int) -> None:
    seen = _run_all(batch * WORLDS_PER_BATCH, WORLDS_PER_BATCH)
    print(dict(seen))
    assert [name for name in MUST_HAPPEN if not seen[name]] == [], "the simulation no longer reaches these"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_rules_hold_in_many_worlds() -> None:
    _run_all(NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS)


def test_a_seed_is_a_world() -> None:
    assert run(11) == run(11)
    assert run(11) != run(12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_paths_add_up_and_the_loss_of_one_is_made_up_for(seed: int, kind: str) -> None:
    check_throughput(seed, kind)


def _run_everything() -> None:
    for seed in range(3):
        check_throughput(seed, KINDS[seed % len(KINDS)])
    _run_all(0, MUTANT_WORLDS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with MUTANTS[name], pytest.raises(SimulationFailed, match="seed"):
        _run_everything()
