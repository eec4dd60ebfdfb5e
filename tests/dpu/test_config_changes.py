"""What a service takes over from a changed configuration, and a pool that is tuned while it is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.service_types import ConfigChange
from meshfusion.dpu.config import ServiceConfig
from meshfusion.dpu.config_changes import RELOADABLE, compare, tuning_of
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_tending import Policy
from meshfusion.jbof.errors import ConfigError
from tests.dpu.pool_cases import SEGMENT_BYTES, SEGMENT_COUNT, Holder, make_pool


def config(**parts: Any) -> ServiceConfig:
    return ServiceConfig.model_validate({"listen": "unix:///run/mf/s", "pool": {"path": "/p"}, **parts})


def test_the_same_changes_nothing() -> None:
    changes = compare(config(), config())
    assert (changes.report.applied, changes.report.needs_restart, changes.running) == ((), (), config())


def test_what_can_is_taken_over_and_the_rest_is_named() -> None:
    before = config(medium={"free_fraction": 0.05}, leases={"lease_ttl_s": 30.0})
    after = config(
        listen="unix:///run/mf/other",
        medium={"free_fraction": 0.1, "drive_writes_per_day": 1.5, "policy": "everything"},
        leases={"lease_ttl_s": 40.0, "max_pinned_fraction": 0.25},
        exports={"target": "nvmet", "portals": ["rdma://10.0.0.1:4420"]},
        stop_grace_s=3.0,
    )
    changes = compare(before, after)
    assert set(changes.report.applied) == {
        ConfigChange("medium.free_fraction", "0.05", "0.1"),
        ConfigChange("medium.drive_writes_per_day", "not set", "1.5"),
        ConfigChange("leases.max_pinned_fraction", "0.5", "0.25"),
        ConfigChange("stop_grace_s", "10", "3"),
    }
    named = {change.key: (change.before, change.after) for change in changes.report.needs_restart}
    assert named["listen"] == ("unix:///run/mf/s", "unix:///run/mf/other")
    assert named["medium.policy"] == ("learned", "everything")
    assert named["leases.lease_ttl_s"] == ("30", "40")
    assert named["exports.portals"] == ("not set", "rdma://10.0.0.1:4420")
    assert changes.running == config(
        medium={"free_fraction": 0.1, "drive_writes_per_day": 1.5},
        leases={"max_pinned_fraction": 0.25},
        stop_grace_s=3.0,
    )


def test_what_waits_for_a_restart_is_named_again_each_time() -> None:
    after = config(leases={"lease_ttl_s": 40.0})
    running = compare(config(), after).running
    (change,) = compare(running, after).report.needs_restart
    assert change.key == "leases.lease_ttl_s"


def test_a_part_that_goes_away_is_a_change() -> None:
    before = config(exports={"target": "nvmet", "portals": ["rdma://10.0.0.1:4420"]})
    keys = {change.key for change in compare(before, config()).report.needs_restart}
    assert {"exports.target", "exports.portals", "exports.authenticate"} <= keys
    assert "exports" not in keys


@pytest.mark.parametrize("key", RELOADABLE)
def test_each_reloadable_key_is_one_of_the_model(key: str) -> None:
    model: Any = ServiceConfig
    *parts, name = key.split(".")
    for part in parts:
        model = model.model_fields[part].annotation
    assert name in model.model_fields


# ---- a pool that is tuned ----------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool", PoolOptions(policy=Policy.EVERYTHING)) as pool:
        yield pool


def tuned(pool: Pool, **parts: Any) -> None:
    pool.retune(tuning_of(config(**parts)))


def test_a_budget_bounds_what_is_opened_from_now_on(pool: Pool) -> None:
    """Six segments, and a quarter of a day's writes at once: four writes a day are six segments at once, 2/3 one."""
    holder = Holder(pool)
    assert holder.put(0, units=15)
    tuned(pool, medium={"drive_writes_per_day": 0.8})
    assert holder.put(1, units=15)
    refused = holder.reserve(2, units=15)
    assert refused.outcome is not api.ReserveOutcome.GRANTED
    assert "medium.drive_writes_per_day" in pool.status(deadline_s=1.0).saves_stopped_reason
    tuned(pool)
    assert holder.put(2, units=15), "without a bound again"


def test_what_was_spent_stays_spent(pool: Pool) -> None:
    tuned(pool, medium={"drive_writes_per_day": 4.0})
    holder = Holder(pool)
    for i in range(4):
        assert holder.put(i, units=15)
    left = pool._parts.taken.shelf.budgets_left(pool._clock())[0]
    assert left == pytest.approx((SEGMENT_COUNT - 4) * SEGMENT_BYTES, rel=0.01)
    tuned(pool, medium={"drive_writes_per_day": 8.0})
    assert pool._parts.taken.shelf.budgets_left(pool._clock())[0] == pytest.approx(left, rel=0.01)


def test_a_budget_below_a_segment_is_refused_and_nothing_changes(pool: Pool) -> None:
    with pytest.raises(ConfigError, match=r"medium\.drive_writes_per_day = 0\.1"):
        tuned(pool, medium={"drive_writes_per_day": 0.1, "free_fraction": 0.5}, drives={"check_interval_s": 1.0})
    assert pool._store.options.free_fraction == 0.05
    assert pool._drives.options.check_interval_s == 5.0
    assert pool._parts.taken.shelf.budgets_left(0.0) == {}


def test_leases_are_bounded_anew(pool: Pool) -> None:
    """A segment each: of six, half may be pinned, then a sixth."""
    holder = Holder(pool)
    for i in range(3):
        assert holder.put(i, units=15)
    replies = [holder.match(0)]
    tuned(pool, leases={"max_pinned_fraction": 1 / 6})
    assert holder.match(0, 1, 2).chunk_count == 1
    tuned(pool, leases={"max_pinned_fraction": 0.5})
    assert holder.match(0, 1, 2).chunk_count == 3
    assert replies[0].lease_id


def test_quarantine_is_bounded_anew(pool: Pool) -> None:
    holder = Holder(pool)
    place = holder.reserve(0)
    doubt = api.AbortRequest(holder.id, holder.attachment.epoch, (), (place.grant_id,))
    pool.abort(doubt, deadline_s=1.0)
    assert holder.put(1)
    tuned(pool, leases={"quarantine_max_fraction": 0.01})
    assert holder.reserve(2).outcome is not api.ReserveOutcome.GRANTED
    assert "quarantined" in pool.status(deadline_s=1.0).saves_stopped_reason


def test_drives_are_looked_at_and_drained_anew(pool: Pool) -> None:
    tuned(pool, drives={"check_interval_s": 0.5, "drain_s": 7.0})
    assert pool._drives.options.check_interval_s == 0.5
    assert pool._drives.lives._drain_s == 7.0
