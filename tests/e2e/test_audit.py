"""The shadow audit in a real engine: what is stored is what it computes, and what it borrows it gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import FilledPool, Prompts
from tests.e2e.harness import Engines, assert_same, embedded


@pytest.mark.nightly
def test_hits_are_computed_compared_and_found_right(
    engines: Engines, model: Path, pool: Path, filled_pool: FilledPool, prompts: Prompts
) -> None:
    # Steps of another size than those it was computed in may round otherwise (on one CPU they were found not to).
    audited = {**embedded(pool), "audit": {"share": 1.0, "alarms_max": 1}}
    engine = engines.start(model, audited, max_num_batched_tokens=384)
    free = engine.call("free_blocks")
    for number in (1, 2):
        answer = engine.answer(prompts.aligned)
        assert answer.cached == 0
        assert_same(answer, filled_pool.answers["aligned"])
        counts = engine.settle()["counts"]
        assert counts["audited_blocks"] == 16 * number
        assert engine.call("free_blocks") == free
        assert engine.call("reset")
    assert counts.get("audit_alarms", 0) == counts.get("audits_without_verdict", 0) == 0
    assert counts.get("loads_started", 0) == counts.get("saves_granted", 0) == 0
    measures = engine.call("measures")
    assert measures["audit_drift_max"] < 1e-4
    assert measures["audit_variation_max"] < 1e-4
    engine.close()
