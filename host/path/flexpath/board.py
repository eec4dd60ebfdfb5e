"""Where people see the paths of an engine process, and say which ones it must not use: two small files.

``paths-<pid>.json`` is written by the engine every second; ``paths-<pid>.orders``, written by mfctl, holds the names of
all paths that are to be disabled. Whatever is wrong with the files costs the engine nothing but them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.path.flexpath.page import (
    MAX_FILE_BYTES,
    Page,
    decode_orders,
    decode_page,
    encode_page,
    orders_name,
    page_name,
)
from meshfusion.host.path.flexpath.report import PathReport
from meshfusion.host.path.flexpath.run_dir import make_run_dir, replace_file, run_dir
from meshfusion.jbof.errors import FormatError, MeshFusionError

logger = logging.getLogger("meshfusion.path")

INTERVAL_S: Final = 1.0
CLOSE_S: Final = 2.0


class ShownPaths(Protocol):
    """What is used of :class:`~meshfusion.host.path.flexpath.multipath.Multipath`."""

    def reports(self) -> Sequence[PathReport]: ...
    def disable(self, name: str) -> None: ...
    def enable(self, name: str) -> None: ...


class ClosingPaths(ShownPaths, Protocol):
    def when_closed(self, call: Callable[[], None]) -> None: ...


class Board:
    """Of the process ``pid``, which began at ``process_started_ns`` of the wall clock. Used by one thread at a time.

    ``opened_ns``, of a clock that only goes forward, tells boards of one process apart: when an engine attaches anew
    its former paths end while the new ones are in use, and the file tells of the latter.
    Whatever a call raises as OSError is trouble with ``folder``.
    """

    def __init__(
        self, paths: ShownPaths, folder: Path, pid: int, pool_uuid: str, *, opened_ns: int, process_started_ns: int
    ) -> None:
        self._paths = paths
        self._page_path = folder / page_name(pid)
        self._orders_path = folder / orders_name(pid)
        self._pid = pid
        self._pool_uuid = pool_uuid
        self._opened_ns = opened_ns
        self._process_started_ns = process_started_ns
        self._told: object = None  # what was wrong with the orders, and was said

    def begin(self, now_s: float) -> None:
        """What a former process of this number left is not ours, and overwritten."""
        try:
            if self._orders_path.stat().st_mtime_ns < self._process_started_ns:
                self._orders_path.unlink()
        except FileNotFoundError:
            pass
        self._follow_orders()
        self._write(now_s)

    def step(self, now_s: float) -> None:
        """To be called every second. ``now_s``: of the wall clock."""
        self._follow_orders()
        if (written_ns := self._written_ns()) is None or written_ns <= self._opened_ns:
            self._write(now_s)

    def end(self) -> None:
        """The orders stay: they are for all paths of the process, also those that it opens later."""
        if self._written_ns() == self._opened_ns:
            self._page_path.unlink(missing_ok=True)

    def _write(self, now_s: float) -> None:
        page = Page(self._pid, self._pool_uuid, now_s, self._opened_ns, tuple(self._paths.reports()))
        replace_file(self._page_path, encode_page(page))

    def _written_ns(self) -> int | None:
        """When the board was opened that wrote the file last; None: there is none."""
        try:
            return decode_page(read_file(self._page_path), str(self._page_path)).opened_ns
        except (FileNotFoundError, FormatError):
            return None

    def _follow_orders(self) -> None:
        """Without any, all stays as it is."""
        try:
            raw = read_file(self._orders_path)
            disabled = decode_orders(raw, str(self._orders_path))
        except FileNotFoundError:
            return
        except (FormatError, OSError) as error:
            if str(error) != self._told:
                logger.warning("paths stay as they are: %s", error)
            self._told = str(error)
            return
        self._told = None
        for name, is_disabled in {report.name: report.is_disabled for report in self._paths.reports()}.items():
            if name in disabled and not is_disabled:
                logger.warning("path %s is disabled by an operator", name)
                self._paths.disable(name)
            elif name not in disabled and is_disabled:
                logger.warning("path %s is enabled by an operator", name)
                self._paths.enable(name)


class ClosableBoard:
    """A board and the thread that keeps it. It begins at once; trouble is told once and ends it."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="flexpath-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(CLOSE_S)

    def _keep(self) -> None:
        try:
            self._board.begin(time.time())
            while not self._is_closing.wait(INTERVAL_S):
                self._board.step(time.time())
            self._board.end()
        except OSError as error:
            _give_up(error)
        except Exception:  # a bug must not cost more than the board
            logger.exception("the board of paths ended")


def show_paths(paths: ClosingPaths, pool_uuid: str) -> None:
    """On a board of this process, until they are closed. Raises nothing."""
    try:
        folder = run_dir(os.environ, os.getuid())
        make_run_dir(folder, os.getuid())
        started_ns = process_started_ns()
    except (OSError, MeshFusionError) as error:
        _give_up(error)
        return
    opened_ns = time.monotonic_ns()
    board = Board(paths, folder, os.getpid(), pool_uuid, opened_ns=opened_ns, process_started_ns=started_ns)
    paths.when_closed(ClosableBoard(board).close)


def read_file(path: Path) -> bytes:
    """Of a board. Raises OSError, and :class:`~meshfusion.jbof.errors.FormatError` for what is too long."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise FormatError(f"{path} is longer than {MAX_FILE_BYTES} bytes", next_step="Remove it.")
    return raw


def _give_up(error: OSError | MeshFusionError) -> None:
    logger.warning("`mfctl path` does not see the paths of this process: %s", error)
