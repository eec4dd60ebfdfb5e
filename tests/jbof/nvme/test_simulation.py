"""The initiator keeps its rules against a target, a fabric and a network that misbehave; planted bugs are found.

A failure names its seed; :func:`tests.jbof.nvme.sim.world.run` brings it back.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.jbof.nvme.sim.mutants import MUTANTS
from tests.jbof.nvme.sim.world import SimulationFailed, run

BATCHES, WORLDS_PER_BATCH = 4, 15
NIGHTLY_FIRST_SEED, NIGHTLY_WORLDS = 100_000, 2000
MUTANT_WORLDS = 150
MUST_HAPPEN = (
    "writes to placement 1",
    "writes to placement None",
    "Connected",
    "ConnectionLost",
    "ControllerLost",
    "DeathOverdue",
    "Disconnected",
    "InventoryChanged",
    "RetryScheduled",
    "TransferDone",
    "TransferFailed",
    "TransferInDoubt",
    "commands failed",
    "connections ignored",
    "connections refused",
    "controllers that are never ready",
    "events told",
    "keep-alives",
    "keys invalidated by the target",
    "keys invalidated here",
    "keys of others invalidated",
    "links broken",
    "links cut in silence",
    "path errors",
    "reads compared",
    "responses cut short",
    "responses late",
    "responses lost",
    "responses to nobody",
    "responses twice",
    "restarts",
    "silences",
    "stages late",
    "storms",
    "writes landed after their queue's death",
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


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with MUTANTS[name], pytest.raises(SimulationFailed, match="seed"):
        _run_all(0, MUTANT_WORLDS)
