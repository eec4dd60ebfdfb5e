"""The boards of this machine's engines: which paths they have, and orders to them.

Two mfctl that change one engine's paths at once may undo each other; each sees whether the engine does as it wished.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import psutil

from meshfusion.host.path.flexpath.board import read_file
from meshfusion.host.path.flexpath.page import Page, decode_orders, decode_page, encode_orders, orders_name, page_name
from meshfusion.host.path.flexpath.run_dir import check_run_dir, replace_file, run_dir
from meshfusion.jbof.errors import ConfigError, FormatError, MeshFusionError

KEPT_S: Final = 10.0
"""Files of a process that is not here stay that long: it may live in another PID namespace, and writes every second."""
OBEYED_S: Final = 5.0
_POLL_S: Final = 0.1
_NAME: Final = re.compile(r"paths-(\d{1,10})\.(json|orders)")

IsGone = Callable[[int, float], bool]


def is_gone(pid: int, written_s: float) -> bool:
    """Is the process no more that wrote a file at ``written_s`` of the wall clock? A later one may have its number."""
    try:
        return psutil.Process(pid).create_time() > written_s + 1
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


class EnginePaths:
    """In the run directory ``folder``, which need not be there. Raises as
    :func:`~meshfusion.host.path.flexpath.run_dir.check_run_dir` does when others could have put files there."""

    def __init__(self, folder: Path, *, is_gone: IsGone = is_gone) -> None:
        self.folder = folder
        self._is_gone = is_gone
        if folder.exists():
            check_run_dir(folder, os.getuid())

    def pages(self, pid: int | None = None) -> list[Page]:
        """Of engines that live, or of that one, by number. What those that are gone left is removed."""
        now_s = time.time()
        pages = []
        for path, owner_pid in self._files():
            try:
                written_s = path.stat().st_mtime
                if self._is_gone(owner_pid, written_s):
                    if now_s - written_s > KEPT_S:
                        path.unlink()
                elif path.name == page_name(owner_pid) and pid in (None, owner_pid):
                    pages.append(decode_page(read_file(path), str(path)))
            except FileNotFoundError:
                continue  # an engine has just closed
            except FormatError as error:
                click.echo(f"left out: {error}", err=True)
        return sorted(pages, key=lambda page: page.pid)

    def with_path(self, name: str, pid: int | None) -> list[Page]:
        """Of engines that have such a path. Raises :class:`~meshfusion.jbof.errors.MeshFusionError`: none has."""
        pages = self.pages(pid)
        if not pages:
            which = "no engine" if pid is None else f"no engine with PID {pid}"
            raise MeshFusionError(f"{which} shows its paths in {self.folder}", next_step=_WHERE)
        found = [page for page in pages if any(path.name == name for path in page.paths)]
        if not found:
            known = sorted({path.name for page in pages for path in page.paths})
            raise ConfigError(
                f"there is no path {name!r}", next_step="Name one of these: " + ", ".join(map(repr, known)) + "."
            )
        return found

    def order(self, page: Page, name: str, *, is_disabled: bool) -> None:
        """Tell that engine. What was ordered before and not done yet stays ordered. Raises OSError."""
        path = self.folder / orders_name(page.pid)
        try:
            disabled = decode_orders(read_file(path), str(path))
        except (FileNotFoundError, FormatError):
            disabled = frozenset(report.name for report in page.paths if report.is_disabled)
        replace_file(path, encode_orders(disabled | {name} if is_disabled else disabled - {name}))

    def wait_until(self, name: str, pids: Sequence[int], *, is_disabled: bool, timeout_s: float = OBEYED_S) -> None:
        """Until these engines show it so. Raises :class:`~meshfusion.jbof.errors.MeshFusionError`: they do not."""
        end_s = time.monotonic() + timeout_s
        while left := self._others(name, pids, is_disabled=is_disabled):
            if time.monotonic() >= end_s:
                wanted = "disabled" if is_disabled else "enabled"
                raise MeshFusionError(
                    f"after {timeout_s:g} s the path {name!r} is not {wanted} in PID {', '.join(map(str, left))}",
                    next_step="See with `mfctl path list` when the engine was last seen, and what its log says; the "
                    "order stays, and is followed when the engine goes on.",
                )
            time.sleep(_POLL_S)

    def _others(self, name: str, pids: Sequence[int], *, is_disabled: bool) -> list[int]:
        shown = {page.pid: page for page in self.pages()}
        return [
            pid
            for pid in pids
            if pid in shown
            and any(path.name == name and path.is_disabled is not is_disabled for path in shown[pid].paths)
        ]

    def _files(self) -> Iterator[tuple[Path, int]]:
        try:
            entries = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        for path in entries:
            if match := _NAME.fullmatch(path.name):
                yield path, int(match.group(1))


_WHERE = (
    "Engines whose path is rdma show them while they are attached; run mfctl as their user, and with the same "
    "MESHFUSION_RUN_DIR if they have one."
)


def engine_paths() -> EnginePaths:
    """Of this user."""
    return EnginePaths(run_dir(os.environ, os.getuid()))
