"""``mfctl`` on pools of several drives: made, shown, one more, one less."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from meshfusion.dpu import drives_keeper
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.drive_return import take_back
from meshfusion.dpu.pool import Pool
from meshfusion.tools.mfctl.doctor import check_pool
from meshfusion.tools.mfctl.findings import State
from tests.dpu.pool_cases import Holder
from tests.host.support.waiting import until
from tests.tools.mfctl.test_mfctl import run

CREATE = ("--size", "6MiB", "--segment-size", "1MiB")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    assert create(tmp_path / "pool", "--drives", "3").exit_code == 0
    return tmp_path / "pool"


def create(path: Path, *options: str) -> Result:
    return run("pool", "create", str(path), *CREATE, *options)


def blank(path: Path) -> str:
    path.touch()
    os.truncate(path, 6 << 20)
    return str(path)


def drives(path: Path) -> list[tuple[int, str]]:
    rows = json.loads(run("jbof", "drives", str(path), "--format", "json").output)["drives"]
    return [(row["number"], row["state"]) for row in rows]


def test_a_pool_of_files_to_try_with(tmp_path: Path) -> None:
    result = create(tmp_path / "pool", "--drives", "3")
    assert result.output.endswith(": 15 segments of 1.0 MiB on 3 drives\n")
    assert sorted(file.name for file in (tmp_path / "pool").glob("data*")) == ["data", "data.1", "data.2"]
    assert "15 of 1.0 MiB: 15 free" in run("pool", "status", str(tmp_path / "pool")).output
    assert run("pool", "check", str(tmp_path / "pool")).exit_code == 0


def test_a_pool_of_named_drives(tmp_path: Path) -> None:
    named = [blank(tmp_path / name) for name in ("a", "b")]
    options = [word for name in named for word in ("--data-path", name)]
    assert create(tmp_path / "pool", *options).exit_code == 0
    table = run("jbof", "drives", str(tmp_path / "pool")).output
    assert all(name in table for name in named)
    assert drives(tmp_path / "pool") == [(0, "here"), (1, "here")]


def test_a_pool_that_is_there_already_is_no_damage(path: Path) -> None:
    for options in ((), ("--drives", "2")):
        result = create(path, *options)
        assert result.exit_code == 1, "a failure; neither wrong usage nor a damaged pool"
        assert f"there is a pool in {path} already" in result.output
        assert f"next step: use it, see mfctl pool status {path}" in result.output
    assert drives(path) == [(0, "here"), (1, "here"), (2, "here")]


def test_drives_as_yaml(path: Path) -> None:
    shown = run("jbof", "drives", str(path), "--format", "yaml")
    assert yaml.safe_load(shown.stdout) == json.loads(run("jbof", "drives", str(path), "--format", "json").stdout)


def test_a_pools_folder_is_listed_without_what_lies_beside_its_data(path: Path) -> None:
    with Pool.open(path):  # so that the lock has something in it
        result = run("jbof", "list", "--file", str(path), "--format", "json")
    found = json.loads(result.stdout)
    assert sorted(drive["slot"] for drive in found["drives"]) == ["data", "data.1", "data.2"]
    passed = {Path(entry["at"]).name: entry["reason"] for entry in found["passed_over"]}
    assert {"owner.lock", "drives"} <= set(passed)
    assert "is not larger than the head of a drive, 1MiB" in passed["owner.lock"]


def test_what_does_not_go_together(tmp_path: Path) -> None:
    a, b = blank(tmp_path / "a"), blank(tmp_path / "b")
    both = ("--data-path", a, "--data-path", b)
    for options in (("--drives", "2", "--data-path", a), (*both, "--force", "--serial", "a"), ("--drives", "0")):
        assert create(tmp_path / "pool", *options).exit_code == 2
    (tmp_path / "b").write_bytes(b"somebody's data" + bytes(6 << 20))
    result = create(tmp_path / "pool", *both)
    assert (result.exit_code, "b is not blank" in result.output) == (4, True)
    assert not (tmp_path / "pool").exists(), "seen before anything was made"


def test_one_more_one_drained_one_less(path: Path, tmp_path: Path) -> None:
    result = run("jbof", "add", str(path), "--size", "8MiB", "--data-path", blank(tmp_path / "new"))
    assert result.exit_code != 0, "it is too small"
    assert "has 6291456 bytes, the pool wants 8388608" in result.output
    result = run("jbof", "add", str(path), "--size", "6MiB", "--data-path", str(tmp_path / "new"))
    assert result.output == "added drive 3 with 5 segments\n"
    assert run("jbof", "drain", str(path), "1", "--yes").output == "drive 1 takes no new chunks any more\n"
    assert drives(path) == [(0, "here"), (1, "draining"), (2, "here"), (3, "here")]
    assert run("jbof", "drain", str(path), "1", "--stop").exit_code == 0
    assert (
        run("jbof", "remove", str(path), "2", "--yes").output
        == "removed drive 2; 0 chunks lay on it and are forgotten\n"
    )
    assert drives(path) == [(0, "here"), (1, "here"), (3, "here")]
    assert json.loads(run("jbof", "remove", str(path), "3", "--yes", "--format", "json").output) == {
        "number": 3,
        "chunks_forgotten": 0,
    }
    result = run("jbof", "add", str(path), "--size", "6MiB", "--data-path", str(tmp_path / "new"))
    assert "--force --serial new" in result.output
    again = ("--data-path", str(tmp_path / "new"), "--force", "--serial", "new", "--format", "json")
    assert json.loads(run("jbof", "add", str(path), "--size", "6MiB", *again).output) == {"number": 4, "segments": 5}


def test_a_pool_that_is_served_is_left_alone(path: Path) -> None:
    with Pool.open(path):
        for command in (("add", str(path), "--size", "6MiB"), ("drain", str(path), "1"), ("remove", str(path), "1")):
            result = run("jbof", *command, *([] if command[0] == "add" else ["--yes"]))
            assert result.exit_code != 0
            assert "in use by process" in result.output
        assert drives(path) == [(0, "here"), (1, "here"), (2, "here")]


@pytest.fixture
def served(path: Path) -> Iterator[Pool]:
    options = DriveOptions(check_interval_s=0.05, probation_s=0.1, drain_s=0.0)
    with Pool.open(path, drive_options=options) as pool:
        server = serve(pool, f"unix://{path.parent}/s", admin=pool.drive_admin)
        pool.announce_service(server.address)
        yield pool
        server.stop(1.0)


def test_the_drives_of_a_running_service(path: Path, served: Pool, tmp_path: Path) -> None:
    assert drives(path) == [(0, "online"), (1, "online"), (2, "online")]
    result = run("jbof", "replace", str(path), "1", "--yes", "--size", "6MiB", "--data-path", blank(tmp_path / "new"))
    assert result.output == "added drive 3 with 5 segments; drive 1 takes no new chunks any more\n"
    until(lambda: drives(path)[1] == (1, "drained"), what="for its end")
    assert f"next step: mfctl jbof remove {path} 1" not in run("jbof", "drives", str(path)).output, "no problem of it"
    assert (
        run("jbof", "remove", str(path), "1", "--yes").output
        == "removed drive 1; 0 chunks lay on it and are forgotten\n"
    )
    assert run("jbof", "remove", str(path), "1", "--yes").exit_code == 0
    assert run("jbof", "drain", str(path), "2", "--yes").exit_code == 0
    assert run("jbof", "drain", str(path), "2", "--stop").output == "drive 2 takes new chunks again\n"
    (path / "data.2").unlink()
    until(lambda: drives(path) == [(0, "online"), (2, "gone"), (3, "online")], what="for the loss")
    shown = run("jbof", "drives", str(path)).output
    assert "drive 2: it is not there" in shown
    assert f"mfctl jbof remove {path} 2" in shown
    result = run("jbof", "remove", str(path), "7", "--yes")
    assert (result.exit_code != 0, f"{path} has no drive 7" in result.output) == (True, True)
    result = run("jbof", "replace", str(path), "7", "--yes", "--size", "6MiB")
    assert result.exit_code != 0
    assert [number for number, _ in drives(path)] == [0, 2, 3], "nothing was added"


def test_a_drive_that_is_back_is_to_be_waited_for(path: Path, served: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()

    def held_up(*arguments: Any) -> None:
        assert may_go.wait(30)
        take_back(*arguments)

    monkeypatch.setattr(drives_keeper, "take_back", held_up)
    (path / "data.1").rename(path / "elsewhere")
    until(lambda: drives(path)[1] == (1, "gone"), what="for the loss")
    (path / "elsewhere").rename(path / "data.1")
    try:
        until(lambda: "waits for its check" in run("jbof", "drives", str(path)).output, what="for the return")
        shown = run("jbof", "drives", str(path)).output
        assert "next step: wait: it is used again when it has been checked" in shown
        assert "jbof remove" not in shown
    finally:
        may_go.set()
    until(lambda: drives(path)[1] == (1, "online"), what="for its trust")


def test_a_drive_that_is_away_is_named(path: Path) -> None:
    (path / "data.1").unlink()
    result = run("jbof", "drives", str(path))
    assert f"drive 1: {path}/data.1 is missing" in result.output
    assert f"mfctl jbof remove {path} 1" in result.output
    assert drives(path) == [(0, "here"), (1, "away"), (2, "here")]
    finding = {finding.check: finding for finding in check_pool(path)}["pool"]
    assert (finding.state, "drive 1 is away" in finding.cause) == (State.WARN, True)
    assert run("jbof", "remove", str(path), "1", "--yes").exit_code == 0
    assert {finding.check: finding for finding in check_pool(path)}["pool"].state is State.OK


def test_an_index_is_made_anew_with_the_drives_that_are_there(path: Path) -> None:
    (path / "data.1").rename(path / "elsewhere")
    result = run("pool", "rebuild-index", str(path))
    assert result.exit_code == 0
    assert f"left out drive 1 and every chunk with a shard on it: {path}/data.1 is missing" in result.output
    (path / "elsewhere").rename(path / "data.1")
    assert drives(path) == [(0, "here"), (1, "away"), (2, "here")], "nothing is known of what it holds"
    assert f"mfctl pool rebuild-index {path}" in run("jbof", "drives", str(path)).output
    result = run("pool", "rebuild-index", str(path), "--format", "json")
    assert json.loads(result.output)["rebuilt"]["drives_left_out"] == []
    assert drives(path) == [(0, "here"), (1, "here"), (2, "here")]


def test_a_check_that_could_not_read_all_does_not_end_well(path: Path) -> None:
    with Pool.open(path) as pool, Holder(pool) as holder:
        for i in range(9):
            assert holder.put(i)
    assert run("pool", "check", str(path)).exit_code == 0
    (path / "data.1").unlink()
    result = run("pool", "check", str(path))
    assert result.exit_code == 1
    assert "chunks were not checked: a drive that they lie on is away" in result.output
    assert f"mfctl jbof drives {path}" in result.output
