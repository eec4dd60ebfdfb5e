"""The scheduler's half of the connector keeps its rules in every order of events; planted bugs are found.

A failure names its seed; ``python -m tests.sim.connector.run --seed N`` brings it back.
"""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.connector.blocks import Violation
from tests.sim.connector.mutants import MUTANTS
from tests.sim.connector.run import SimulationFailed, live, run, run_at_once, run_many, watched

HISTORIES = 100_000
NIGHTLY_FIRST_SEED, NIGHTLY_HISTORIES = 10_000_000, 1_000_000
MUTANT_HISTORIES = 4000
MUST_HAPPEN = (
    "aborted loaded",
    "aborted loading",
    "aborted running",
    "aborted waiting",
    "aborted while loading",
    "busy",
    "commits",
    "commits refused",
    "counted lookups_timed_out",
    "counted lookups_without_path",
    "counted promises_lost",
    "counted promises_too_old",
    "counted saves_dropped_queue_full",
    "counted saves_dropped_service",
    "counted saves_repeated",
    "drops",
    "engine deaths",
    "evictions",
    "failed writes",
    "finished",
    "grants lapsed",
    "hits",
    "leases lost",
    "load failures",
    "loads",
    "loads of whole prompts",
    "loads refused",
    "mismatches",
    "no space",
    "not admitted",
    "preemptions",
    "probes",
    "promises not taken",
    "promises trimmed",
    "resets",
    "rotten chunks",
    "saves",
    "saves refused by the worker",
    "service restarts",
    "writes in doubt",
)


@pytest.mark.timeout(900)
def test_rules_hold_in_every_history() -> None:
    seen = run_at_once(0, HISTORIES)
    assert [name for name in MUST_HAPPEN if not seen[name]] == [], "the simulation no longer reaches these"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_rules_hold_in_many_histories() -> None:
    run_at_once(NIGHTLY_FIRST_SEED, NIGHTLY_HISTORIES)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_rules_hold_whatever_is_drawn(rng: random.Random) -> None:
    """Few histories; but one that fails is made as small as it gets."""
    with watched():
        try:
            live(rng)
        except Violation as violation:
            raise SimulationFailed(str(violation)) from violation


def test_a_seed_is_a_history() -> None:
    with watched():
        assert run(11) == run(11)
        assert run(11) != run(12)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.planted(), pytest.raises(SimulationFailed, match="--seed") as failure:
        run_many(0, MUTANT_HISTORIES)
    assert re.search(mutant.symptoms, str(failure.value))
