"""Several pools as one: what they hold, how far they are, what they are tuned to, and their end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from meshfusion.dpu.api.service_types import KeyChange, ReplacedKey
from meshfusion.dpu.config import ServiceConfig, load_service_config
from meshfusion.dpu.config_changes import compare
from meshfusion.dpu.drain import Held
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.tuning import Tuning
from meshfusion.jbof.errors import ConfigError, FormatError, ServiceError
from meshfusion.tools.mfctl.exported_pool import pool_of
from meshfusion.tools.mfctl.pool_start import open_pools
from meshfusion.tools.mfctl.reloader import Reloader
from meshfusion.tools.mfctl.served_pools import ServedPools
from tests.dpu.pool_cases import Holder


def config_of(folder: Path, more: str = "", *, budget: float = 3.0) -> Path:
    sizes = "create: true, size: 16MiB, segment_size: 2MiB"
    path = folder / "service.yaml"
    path.write_text(
        f"listen: unix://{folder}/s\n"
        f"audit: {{path: {folder}/audit.log}}\n"
        "pools:\n"
        f"  r: {{tenants: [red], pool: {{path: {folder}/red, {sizes}}}, medium: {{drive_writes_per_day: {budget}}}}}\n"
        f"  b: {{tenants: [blue], pool: {{path: {folder}/blue, {sizes}}}, medium: {{free_fraction: 0.25}}}}\n{more}"
    )
    return path


def never(error: FormatError) -> None:
    raise AssertionError(error)


def opened(config: ServiceConfig) -> ServedPools:
    return open_pools(config, never, may_take_over=False)


def test_what_any_of_them_holds_counts(tmp_path: Path) -> None:
    pools = opened(load_service_config(config_of(tmp_path)))
    try:
        with Holder(pools.service, tenant="red") as red, Holder(pools.service, tenant="blue") as blue:
            assert pools.held() == Held(0, 0)
            assert red.put(0)
            assert blue.put(0)
            red.match(0)
            blue.match(0)
            assert pools.held() == Held(0, 2)
    finally:
        pools.close()
    for name in ("red", "blue"):
        Pool.open(tmp_path / name, tenants=frozenset({name})).close()  # so it was given up


def test_how_far_each_is_is_asked_of_each(tmp_path: Path) -> None:
    pools = opened(load_service_config(config_of(tmp_path)))
    try:
        red, blue = pools.looks(patience_s=0.05)
        before_red, before_blue = red(), blue()
        with Holder(pools.service, tenant="blue") as holder:
            assert holder.put(0)
            assert red() == before_red
            assert blue() != before_blue
    finally:
        pools.close()


def test_each_is_tuned_to_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: dict[str, Tuning] = {}
    monkeypatch.setattr(Pool, "retune", lambda pool, tuning: tuned.__setitem__(pool.pool_uuid, tuning))
    pools = opened(load_service_config(config_of(tmp_path)))
    shared = "leases: {max_pinned_fraction: 0.25, quarantine_max_fraction: 0.125}\ndrives: {check_interval_s: 7}\n"
    try:
        assert pools.router is not None
        uuids = pools.router.uuids
        pools.retune(load_service_config(config_of(tmp_path, shared, budget=2.0)))
    finally:
        pools.close()
    red, blue = tuned[uuids["r"]], tuned[uuids["b"]]
    assert (red.drive_writes_per_day, red.free_fraction) == (2.0, 0.05)
    assert (blue.drive_writes_per_day, blue.free_fraction) == (None, 0.25)
    for one in (red, blue):
        assert (one.max_pinned_fraction, one.quarantine_max_fraction) == (0.25, 0.125)
        assert (one.check_interval_s, one.drain_s) == (7.0, 600.0)


def test_a_rebuild_finds_its_pool_among_several(tmp_path: Path) -> None:
    config = load_service_config(config_of(tmp_path))
    assert pool_of(tmp_path / "x" / ".." / "red", config, None).medium.drive_writes_per_day == 3.0
    assert pool_of(tmp_path / "blue", config, None).medium.drive_writes_per_day is None
    with pytest.raises(ConfigError) as caught:
        pool_of(tmp_path / "green", config, Path("f.yaml"))
    assert caught.value.message == f"{tmp_path}/green is no pool of f.yaml"
    assert caught.value.next_step == f"name one of them: {tmp_path}/red, {tmp_path}/blue"


def test_a_reload_takes_over_what_of_a_pool_it_can_and_names_the_rest(tmp_path: Path) -> None:
    running = load_service_config(config_of(tmp_path))
    path = config_of(tmp_path, "leases: {max_pinned_fraction: 0.25}\n", budget=2.0)
    path.write_text(path.read_text().replace("tenants: [blue]", "tenants: [blue, navy]"))
    changes = compare(running, load_service_config(path))
    assert {change.key: (change.before, change.after) for change in changes.report.applied} == {
        "leases.max_pinned_fraction": ("0.5", "0.25"),
        "pools.r.medium.drive_writes_per_day": ("3", "2"),
    }
    assert [change.key for change in changes.report.needs_restart] == ["pools.b.tenants"]
    assert changes.running.pools is not None
    assert running.pools is not None
    assert changes.running.medium_of("r").drive_writes_per_day == 2.0
    assert running.medium_of("r").drive_writes_per_day == 3.0, "what ran before is as it was"
    assert changes.running.pools["b"] == running.pools["b"]

    tuned: list[ServiceConfig] = []
    reloader = Reloader(path, running, retune=tuned.append, relog=lambda log: None)
    reloader.reload()
    assert tuned == [changes.running] == [reloader.running]


def test_pools_that_come_and_go_wait_for_a_restart(tmp_path: Path) -> None:
    """Also what could be changed of one that is served: there is nothing yet, or any more, to be tuned."""
    running = load_service_config(config_of(tmp_path))
    path = config_of(tmp_path)
    path.write_text(path.read_text().replace("  b: {", "  b.2: {"))
    changes = compare(running, load_service_config(path))
    assert changes.report.applied == ()
    keys = {change.key for change in changes.report.needs_restart}
    assert {"pools.b.medium.free_fraction", "pools.b.2.medium.free_fraction", "pools.b.tenants"} <= keys
    assert changes.running == running


def test_a_budget_that_does_not_fit_one_of_them_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = load_service_config(config_of(tmp_path))
    pools = opened(running)
    real, refused = Pool.retune, list[Tuning]()
    budgets: dict[str, float | None] = {}

    def retune(pool: Pool, tuning: Tuning) -> None:
        if tuning.free_fraction == 0.3:
            refused.append(tuning)
            raise ConfigError("too little", next_step="more")
        real(pool, tuning)
        budgets[pool.pool_uuid] = tuning.drive_writes_per_day

    monkeypatch.setattr(Pool, "retune", retune)
    try:
        path = config_of(tmp_path, budget=2.0)
        path.write_text(path.read_text().replace("free_fraction: 0.25", "free_fraction: 0.3"))
        reloader = Reloader(path, running, retune=pools.retune, relog=lambda log: None)
        with pytest.raises(ConfigError, match="too little"):
            reloader.reload()
        assert len(refused) == 1
        assert reloader.running == running
        assert pools.router is not None
        assert budgets[pools.router.uuids["r"]] == 3.0, "the first has its own again"
    finally:
        pools.close()


def test_keys_of_all_pools_are_waited_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool's engine that takes no key must not use up the time of the others'."""
    pools, asked = opened(load_service_config(config_of(tmp_path))), list[object]()
    names = {id(pool): served.name for served, pool in pools.each}
    both = threading.Barrier(2, timeout=10.0)

    def replace_keys(self: Pool, holder_id: str, *, deadline_s: float) -> dict[str, KeyChange]:
        both.wait()
        asked.append((names[id(self)], holder_id, deadline_s))
        return {f"of {names[id(self)]}": KeyChange.DONE}

    try:
        monkeypatch.setattr(Pool, "replace_keys", replace_keys)
        replaced = pools.replace_keys("", "", 7.0)
        assert replaced == (ReplacedKey("of b", KeyChange.DONE), ReplacedKey("of r", KeyChange.DONE))
        assert set(asked) == {("b", "", 7.0), ("r", "", 7.0)}
        with pytest.raises(ServiceError, match="this service has no pool 'green'") as caught:
            pools.replace_keys("green", "", 7.0)
        assert caught.value.next_step == "name one: r, b"
    finally:
        pools.close()


def test_a_holder_is_looked_for_in_every_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, asked = opened(load_service_config(config_of(tmp_path))), list[object]()
    names = {id(pool): served.name for served, pool in pools.each}

    def replace_keys(self: Pool, holder_id: str, *, deadline_s: float) -> dict[str, KeyChange]:
        asked.append(names[id(self)])
        return {holder_id: KeyChange.DONE}

    try:
        monkeypatch.setattr(Pool, "replace_keys", replace_keys)
        with Holder(pools.service, tenant="blue") as blue:
            pools.replace_keys("", blue.attachment.holder_id, 0.0)
            pools.replace_keys("r", blue.attachment.holder_id, 0.0)
            pools.replace_keys("", "nobody", 0.0)
        assert asked == ["b", "r", "r"]
    finally:
        pools.close()
