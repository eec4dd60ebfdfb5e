"""``mfctl path list|disable|enable`` beside engines that are files in a folder, or boards of real ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.host.path.flexpath.board import Board
from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.page import (
    Page,
    decode_orders,
    decode_page,
    encode_page,
    orders_name,
    page_name,
    page_object,
)
from meshfusion.host.path.flexpath.report import PathReport
from meshfusion.host.path.flexpath.run_dir import replace_file
from meshfusion.tools.mfctl import engine_paths
from meshfusion.tools.mfctl.main import mfctl

GONE = (1 << 22) + 1  # above Linux' greatest PID (include/linux/threads.h)
FIRST, SECOND = "eth0 to 10.0.0.1 port 4420", "eth1 to 10.0.1.1 port 4420"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["path", *arguments])


def report(name: str, **changes: object) -> PathReport:
    made = PathReport(name, PathState.LIVE, True, 2.5e9, 0.00125, 3 << 20, 5 << 30, 0, "", False)
    return made._replace(**changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("MESHFUSION_RUN_DIR", str(made))
    return made


def write(folder: Path, pid: int, *paths: PathReport) -> Page:
    page = Page(pid, f"pool-{pid}", time.time(), 1, paths)
    replace_file(folder / page_name(pid), encode_page(page))
    return page


def orders(folder: Path, pid: int) -> frozenset[str]:
    return decode_orders((folder / orders_name(pid)).read_bytes(), "test")


class Engine:
    """One that lives, and does what it is told: the board of this process, turned by a thread."""

    def __init__(self, folder: Path, *names: str, pid: int) -> None:
        self.paths = {name: report(name) for name in names}
        self._board = Board(self, folder, pid, "a-pool", opened_ns=1, process_started_ns=0)
        self._board.begin(time.time())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._turn)

    def reports(self) -> list[PathReport]:
        return list(self.paths.values())

    def disable(self, name: str) -> None:
        self.paths[name] = self.paths[name]._replace(is_disabled=True)

    def enable(self, name: str) -> None:
        self.paths[name] = self.paths[name]._replace(is_disabled=False)

    def disabled(self) -> list[str]:
        return [path.name for path in self.reports() if path.is_disabled]

    def _turn(self) -> None:
        while not self._over.wait(0.01):
            self._board.step(time.time())

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def everybody_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for :data:`GONE`."""
    is_gone = {"is_gone": lambda pid, written_s: pid == GONE}
    monkeypatch.setattr(engine_paths.EnginePaths.__init__, "__kwdefaults__", is_gone)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_paths.EnginePaths.wait_until, "__kwdefaults__", {"timeout_s": 0.2})


# ---- list ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("everybody_lives")
def test_all_engines_are_listed(folder: Path) -> None:
    write(folder, 12, report(FIRST, last_error="no route\nto host"), report(SECOND, is_disabled=True))
    write(folder, 7, report(FIRST, is_measured=False, state=PathState.QUARANTINED))
    result = run("list")
    assert result.exit_code == 0, result.output
    header, *rows = result.output.splitlines()
    assert header.split()[:4] == ["PID", "POOL", "PATH", "STATE"]
    assert rows[0].startswith(f"7    pool-7   {FIRST}  quarantined  -          -        3.0 MiB    5.0 GiB  0 B")
    assert rows[1].startswith(f"12   pool-12  {FIRST}  live         2500 MB/s  1.25 ms  3.0 MiB    5.0 GiB  0 B")
    assert rows[1].endswith("s ago  no route\N{REPLACEMENT CHARACTER}to host")
    assert rows[2].startswith(f"12   pool-12  {SECOND}  disabled     2500 MB/s")
    assert len(rows) == 3
    assert [row.split()[0] for row in run("list", "--pid", "12").output.splitlines()] == ["PID", "12", "12"]


@pytest.mark.usefixtures("everybody_lives")
def test_a_program_gets_what_the_engine_wrote(folder: Path) -> None:
    page = write(folder, 12, report(FIRST))
    assert json.loads(run("list", "--format", "json").output) == {"engines": [page_object(page)]}


def test_where_there_is_none_it_says_where_it_looked(folder: Path) -> None:
    folder.rmdir()
    result = run("list")
    assert result.exit_code == 0
    assert str(folder) in result.stderr
    assert json.loads(run("list", "--format", "json").stdout) == {"engines": []}


@pytest.mark.usefixtures("everybody_lives")
def test_what_dead_engines_left_is_not_shown_and_is_removed(folder: Path) -> None:
    write(folder, GONE, report(FIRST))
    write(folder, os.getpid(), report(SECOND))
    (folder / orders_name(GONE)).write_bytes(b"[]")
    (folder / "meshfusion.sock").touch()
    assert FIRST not in run("list").output
    assert (folder / page_name(GONE)).exists(), "its process may live where we do not see it"
    for name in (page_name(GONE), orders_name(GONE), page_name(os.getpid()), "meshfusion.sock"):
        os.utime(folder / name, (time.time() - 11,) * 2)
    assert SECOND in run("list").output
    assert {path.name for path in folder.iterdir()} == {page_name(os.getpid()), "meshfusion.sock"}


def test_a_process_that_has_a_dead_ones_number_is_another() -> None:
    assert not engine_paths.is_gone(os.getpid(), time.time())
    assert engine_paths.is_gone(os.getpid(), 1.0)
    assert engine_paths.is_gone(GONE, time.time())


@pytest.mark.usefixtures("everybody_lives")
def test_a_page_that_cannot_be_read_hides_no_other(folder: Path) -> None:
    write(folder, 12, report(FIRST))
    (folder / page_name(7)).write_bytes(b"{")
    result = run("list")
    assert result.exit_code == 0
    assert FIRST in result.stdout
    assert page_name(7) in result.stderr


def test_a_folder_that_others_can_write_to_is_not_believed(folder: Path) -> None:
    folder.chmod(0o777)
    for command in (("list",), ("disable", FIRST), ("enable", FIRST)):
        result = run(*command)
        assert result.exit_code == 1
        assert "written to by others" in result.stderr
        assert "next step" in result.stderr


# ---- disable and enable ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("everybody_lives")
def test_engines_follow_and_mfctl_waits_for_that(folder: Path) -> None:
    with Engine(folder, FIRST, SECOND, pid=1) as one, Engine(folder, FIRST, pid=2) as two:
        result = run("disable", FIRST)
        assert result.output == f"disabled {FIRST} in PID 1, 2\n"
        assert (one.disabled(), two.disabled()) == ([FIRST], [FIRST])
        assert run("disable", SECOND).exit_code == 0
        assert one.disabled() == [FIRST, SECOND], "what was ordered before stays"
        result = run("enable", FIRST, "--pid", "1", "--format", "json")
        assert json.loads(result.output) == {"path": FIRST, "is_disabled": False, "pids": [1]}
        assert (one.disabled(), two.disabled()) == ([SECOND], [FIRST])


@pytest.mark.usefixtures("everybody_lives")
def test_a_name_that_no_engine_has_is_refused_with_those_that_there_are(folder: Path) -> None:
    write(folder, 1, report(FIRST))
    write(folder, 2, report(SECOND))
    result = run("disable", "eth9")
    assert result.exit_code == 1
    assert "no path 'eth9'" in result.stderr
    assert f"'{FIRST}', '{SECOND}'" in result.stderr
    assert "there is no path" in run("enable", SECOND, "--pid", "1").stderr
    assert not list(folder.glob("*.orders"))


def test_without_engines_it_says_so(folder: Path) -> None:
    result = run("disable", FIRST)
    assert result.exit_code == 1
    assert f"no engine shows its paths in {folder}" in result.stderr
    assert "no engine with PID 5" in run("disable", FIRST, "--pid", "5").stderr


@pytest.mark.usefixtures("everybody_lives", "impatient")
def test_an_engine_that_does_not_follow_is_named(folder: Path) -> None:
    write(folder, 1, report(FIRST), report(SECOND, is_disabled=True))
    with Engine(folder, FIRST, pid=2) as obeying:
        result = run("disable", FIRST)
        assert result.exit_code == 1
        assert "is not disabled in PID 1\n" in result.stderr
        assert obeying.disabled() == [FIRST]
    assert orders(folder, 1) == {FIRST, SECOND}, "what it shows as disabled stays so"


@pytest.mark.usefixtures("everybody_lives", "impatient")
def test_an_engine_that_ends_meanwhile_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 1, report(FIRST))
    ordered: Callable[..., None] = engine_paths.EnginePaths.order

    def order_and_end(*arguments: object, **options: object) -> None:
        ordered(*arguments, **options)
        (folder / page_name(1)).unlink()

    monkeypatch.setattr(engine_paths.EnginePaths, "order", order_and_end)
    assert run("disable", FIRST).exit_code == 0


@pytest.mark.usefixtures("everybody_lives")
def test_orders_that_cannot_be_read_are_replaced(folder: Path) -> None:
    with Engine(folder, FIRST, SECOND, pid=1) as engine:
        (folder / orders_name(1)).write_bytes(b"nonsense")
        assert run("disable", SECOND).exit_code == 0
        assert engine.disabled() == [SECOND]
    assert [path.is_disabled for path in decode_page((folder / page_name(1)).read_bytes(), "test").paths] == [
        False,
        True,
    ]
