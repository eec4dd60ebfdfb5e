"""What an engine shows of its paths in a folder, and the orders that it takes there: codecs, files, and trouble."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.path.flexpath import board as board_module
from meshfusion.host.path.flexpath.board import Board, show_paths
from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.page import (
    MAX_FILE_BYTES,
    Page,
    decode_orders,
    decode_page,
    encode_orders,
    encode_page,
    orders_name,
    page_name,
)
from meshfusion.host.path.flexpath.report import PathReport
from meshfusion.host.path.flexpath.run_dir import check_run_dir, make_run_dir, replace_file, run_dir
from meshfusion.jbof.errors import ConfigError, FormatError
from tests.host.path.flexpath.multipath_rig import rig, soon

PID = 77
STARTED_NS = 5_000_000_000
NAMES = ("eth0 to 10.0.0.1 port 4420", "eth1 to 10.0.1.1 port 4420")
AMOUNTS = st.integers(0, 1 << 60)
REPORTS = st.builds(
    PathReport,
    st.text(),
    st.sampled_from(PathState),
    st.booleans(),
    st.floats(0, 1e15),
    st.floats(0, 1e6),
    AMOUNTS,
    AMOUNTS,
    AMOUNTS,
    st.text(),
    st.booleans(),
)


def report(name: str, *, is_disabled: bool = False) -> PathReport:
    return PathReport(name, PathState.LIVE, True, 1e9, 0.001, 5, 6, 7, "", is_disabled)


class FakePaths:
    """With the names of :data:`NAMES`. ``calls``: what was asked for."""

    def __init__(self) -> None:
        self.disabled: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.closing: list[Callable[[], None]] = []

    def reports(self) -> list[PathReport]:
        return [report(name, is_disabled=name in self.disabled) for name in NAMES]

    def disable(self, name: str) -> None:
        self.calls.append(("disable", name))
        self.disabled.add(name)

    def enable(self, name: str) -> None:
        self.calls.append(("enable", name))
        self.disabled.remove(name)

    def when_closed(self, call: Callable[[], None]) -> None:
        self.closing.append(call)


def board_of(paths: FakePaths, folder: Path, opened_ns: int = 1) -> Board:
    return Board(paths, folder, PID, "a-pool", opened_ns=opened_ns, process_started_ns=STARTED_NS)


def shown(folder: Path) -> Page:
    return decode_page((folder / page_name(PID)).read_bytes(), "test")


def order(folder: Path, raw: bytes, written_s: float = 10.0) -> None:
    replace_file(folder / orders_name(PID), raw)
    os.utime(folder / orders_name(PID), (written_s, written_s))


# ---- codecs ----------------------------------------------------------------------------------------------------------


@given(st.builds(Page, AMOUNTS, st.text(), st.floats(0, 1e12), AMOUNTS, st.lists(REPORTS, max_size=4).map(tuple)))
def test_a_page_comes_back(page: Page) -> None:
    assert decode_page(encode_page(page), "test") == page


def test_a_page_is_what_others_read() -> None:
    raw = encode_page(Page(PID, "a-pool", 12.5, 3, (report(NAMES[0], is_disabled=True),)))
    assert json.loads(raw) == {
        "pid": 77,
        "pool_uuid": "a-pool",
        "written_s": 12.5,
        "opened_ns": 3,
        "paths": [
            {
                "name": "eth0 to 10.0.0.1 port 4420",
                "state": "live",
                "is_measured": True,
                "bandwidth_bytes_per_s": 1e9,
                "latency_s": 0.001,
                "outstanding_bytes": 5,
                "read_bytes": 6,
                "written_bytes": 7,
                "last_error": "",
                "is_disabled": True,
            }
        ],
    }


@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
    lambda value: json.dumps(value).encode()
))  # fmt: skip
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        decode_page(raw, "test")
    try:
        names = decode_orders(raw, "test")
    except FormatError:
        return
    assert set(json.loads(raw)) == names


@pytest.mark.parametrize("change", [{"pid": True}, {"pid": -1}, {"written_s": "1"}, {"paths": {}}, {"paths": [1]}])
def test_members_of_other_types_are_refused(change: dict[str, object]) -> None:
    read = json.loads(encode_page(Page(PID, "a-pool", 12.5, 3, ())))
    assert decode_page(json.dumps({**read, "more": 1}).encode(), "test").pid == PID, "a later version may say more"
    with pytest.raises(FormatError):
        decode_page(json.dumps({**read, **change}).encode(), "test")


@given(st.frozensets(st.text()))
def test_orders_come_back(names: frozenset[str]) -> None:
    assert decode_orders(encode_orders(names), "test") == names


# ---- the board -------------------------------------------------------------------------------------------------------


def test_it_shows_the_paths_until_it_ends(tmp_path: Path) -> None:
    paths = FakePaths()
    board = board_of(paths, tmp_path)
    board.begin(20.0)
    assert shown(tmp_path) == Page(PID, "a-pool", 20.0, 1, tuple(paths.reports()))
    paths.disabled.add(NAMES[1])
    board.step(21.0)
    assert shown(tmp_path) == Page(PID, "a-pool", 21.0, 1, tuple(paths.reports()))
    assert [path.name for path in tmp_path.iterdir()] == [page_name(PID)]
    assert (tmp_path / page_name(PID)).stat().st_mode & 0o077 == 0
    board.end()
    assert list(tmp_path.iterdir()) == []


def test_it_follows_orders_and_shows_that_at_once(tmp_path: Path) -> None:
    paths = FakePaths()
    board = board_of(paths, tmp_path)
    board.begin(20.0)
    order(tmp_path, encode_orders([NAMES[1], "another engine's"]))
    board.step(21.0)
    assert paths.calls == [("disable", NAMES[1])]
    assert [path.is_disabled for path in shown(tmp_path).paths] == [False, True]
    board.step(22.0)
    assert len(paths.calls) == 1
    order(tmp_path, encode_orders([]))
    board.step(23.0)
    assert paths.calls[1:] == [("enable", NAMES[1])]


def test_paths_that_are_opened_later_in_the_process_follow_its_orders(tmp_path: Path) -> None:
    first, second = FakePaths(), FakePaths()
    former = board_of(first, tmp_path, opened_ns=1)
    former.begin(20.0)
    order(tmp_path, encode_orders([NAMES[0]]))
    former.step(21.0)
    board_of(second, tmp_path, opened_ns=2).begin(22.0)
    assert second.disabled == {NAMES[0]}
    former.step(23.0)
    assert (shown(tmp_path).opened_ns, shown(tmp_path).written_s) == (2, 22.0), "the former shows itself no more"
    former.end()
    assert shown(tmp_path).opened_ns == 2


def test_what_a_former_process_of_the_number_left_does_not_count(tmp_path: Path) -> None:
    replace_file(tmp_path / page_name(PID), encode_page(Page(PID, "other", 1.0, 1 << 60, ())))
    order(tmp_path, encode_orders(NAMES), written_s=STARTED_NS / 1e9 - 1)
    paths = FakePaths()
    board_of(paths, tmp_path).begin(20.0)
    assert paths.calls == []
    assert shown(tmp_path).pool_uuid == "a-pool"
    assert not (tmp_path / orders_name(PID)).exists()


@pytest.mark.parametrize("raw", [b"", b"{}", b'["a', b"[1]", b"\xff", b"[" * 100_000, b'["' + b"x" * MAX_FILE_BYTES])
def test_orders_that_cannot_be_read_change_nothing_and_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    paths = FakePaths()
    paths.disabled.add(NAMES[0])
    board = board_of(paths, tmp_path)
    board.begin(20.0)
    order(tmp_path, raw)
    for now_s in (21.0, 22.0, 23.0):
        board.step(now_s)
    assert paths.calls == []
    assert shown(tmp_path).written_s == 23.0
    assert len([record for record in caplog.records if "paths stay as they are" in record.message]) == 1
    order(tmp_path, encode_orders(NAMES))
    board.step(24.0)
    assert paths.disabled == set(NAMES)
    order(tmp_path, raw)
    board.step(25.0)
    assert len([record for record in caplog.records if "paths stay as they are" in record.message]) == 2, "anew"


# ---- the run directory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"MESHFUSION_RUN_DIR": "/x", "XDG_RUNTIME_DIR": "/run/user/7"}, 0, "/x"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/meshfusion"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/meshfusion"),
        ({"MESHFUSION_RUN_DIR": "", "XDG_RUNTIME_DIR": ""}, 7, "/tmp/meshfusion-7"),
    ],
)
def test_where_the_run_directory_is(environ: dict[str, str], uid: int, expected: str) -> None:
    assert run_dir(environ, uid) == Path(expected)


def test_it_is_made_for_its_user_alone(tmp_path: Path) -> None:
    make_run_dir(tmp_path / "a" / "b", os.getuid())
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_run_dir(tmp_path / "a" / "b", os.getuid())


def test_one_that_others_could_write_to_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir(mode=0o755)
    check_run_dir(good, os.getuid())
    with pytest.raises(ConfigError, match="belongs to uid"):
        check_run_dir(good, os.getuid() + 1)
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(ConfigError, match="not a directory"):
        check_run_dir(tmp_path / "link", os.getuid())
    good.chmod(0o777)
    with pytest.raises(ConfigError, match="written to by others"):
        check_run_dir(good, os.getuid())


# ---- its thread ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(board_module, "INTERVAL_S", 0.01)
    monkeypatch.setenv("MESHFUSION_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_the_paths_of_a_process_are_on_its_board_until_they_are_closed(folder: Path) -> None:
    page, orders = folder / page_name(os.getpid()), folder / orders_name(os.getpid())
    with rig() as r:
        show_paths(r.paths, "a-pool")
        soon(page.exists, "for the page")
        r.used()
        soon(lambda: sum(path.read_bytes for path in decode_page(page.read_bytes(), "").paths) == 40 * 4096, "")
        replace_file(orders, encode_orders(["p1"]))
        soon(lambda: [path.is_disabled for path in decode_page(page.read_bytes(), "").paths] == [False, True], "")
        assert r.used() == {0}
        replace_file(orders, encode_orders([]))
        soon(lambda: not any(path.is_disabled for path in r.paths.reports()), "for p1")
    assert not page.exists()


def test_trouble_with_the_folder_is_told_once_and_costs_the_board_only(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    paths = FakePaths()
    show_paths(paths, "a-pool")
    assert paths.closing == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "written to by others" in record.message


def test_a_folder_that_goes_away_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = FakePaths()
    show_paths(paths, "a-pool")
    page = folder / page_name(os.getpid())
    soon(page.exists, "for the page")
    folder.rename(folder.with_name("elsewhere"))
    soon(lambda: caplog.records, "to hear of it")
    for close in paths.closing:
        close()
    (record,) = caplog.records
    assert "does not see the paths" in record.message
