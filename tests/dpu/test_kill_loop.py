"""kill -9 at any moment, on a file and on a loop device: nothing that was acknowledged is lost, and no space is."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool
from tests.dpu.kill_loop import KillLoop, Model, Saved
from tests.dpu.pool_cases import SIZE_BYTES, make_pool
from tests.dpu.test_pool_faults import fill_completely
from tests.jbof.loop_devices import loop_device_of


def live_through(pool: Path, work: Path, *, seed: int, rounds: int) -> None:
    loop = KillLoop(pool, work, seed)
    loop.run(rounds)
    loop.check()
    assert loop.model.commits >= 2 * rounds, "hardly anything was saved"
    with Pool.open(pool) as opened:
        fill_completely(opened)


@pytest.mark.timeout(600)
def test_on_a_file(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    live_through(tmp_path / "pool", tmp_path, seed=5, rounds=20)


@pytest.mark.timeout(600)
def test_on_a_loop_device(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(SIZE_BYTES))
    with loop_device_of(tmp_path / "data") as device:
        make_pool(tmp_path / "pool", device)
        live_through(tmp_path / "pool", tmp_path, seed=6, rounds=6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_many_times_on_a_file(tmp_path: Path, seed: int) -> None:
    make_pool(tmp_path / "pool")
    live_through(tmp_path / "pool", tmp_path, seed=seed, rounds=150)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_times_on_a_loop_device(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(SIZE_BYTES))
    with loop_device_of(tmp_path / "data") as device:
        make_pool(tmp_path / "pool", device)
        live_through(tmp_path / "pool", tmp_path, seed=7, rounds=150)


def test_what_the_loop_would_find() -> None:
    """Its own judgement: lost, changed, back again; and what is none of these."""
    one, other = Saved(("aa",), 3, 7), Saved(("bb",), 4, 2)
    model = Model()
    model.take({"do": "commit", "i": 0, "digests": ["aa"], "segment": 3, "generation": 7})
    assert model.problem(0, None, {3: 7}) == model.problem(0, one, {3: 7}) == "", "nobody knows yet"
    model.take({"done": "commit", "i": 0})
    assert "lost" in model.problem(0, None, {3: 7})
    assert model.problem(0, None, {3: 8}) == "", "reclaimed"
    assert "not" in model.problem(0, other, {3: 7, 4: 2})
    assert "not" in model.problem(1, other, {3: 7, 4: 2}), "never saved"
    model.take({"do": "drop", "i": 0})
    assert model.problem(0, None, {3: 7}) == model.problem(0, one, {3: 7}) == ""
    model.take({"done": "drop", "i": 0})
    assert "not" in model.problem(0, one, {3: 7}), "back again"
