"""Looking through a doubtful index without risk to this process: a damaged LMDB page can kill whoever reads it.

In a child process; a new interpreter, not a fork: the caller may be an engine with many threads and locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from meshfusion.dpu.index import IndexTotals
from meshfusion.dpu.index_errors import OTHER_POOL, REBUILD, OtherPoolError
from meshfusion.dpu.index_files import open_index
from meshfusion.jbof.errors import FormatError, MeshFusionError

_EXIT_REPORTED = 3
_EXIT_ORPHANED = 4
_EXIT_OTHER_POOL = 5
_BEGUN_S = 10.0
_LOWEST, _YIELDING = 19, 10  # by how much nicer than its maker a scan is that nobody waits for


class IndexScan:
    """A scan under way, from its making on. :meth:`wait` for it or :meth:`stop` it."""

    def __init__(self, path: Path, pool_uuid: str, capacity_bytes: int) -> None:
        self._path = path
        command = [sys.executable, "-m", "meshfusion.dpu.index_scan", str(path), pool_uuid, str(capacity_bytes)]
        childs_end, self._our_end = os.pipe()  # it closes when this process ends, however that comes about
        try:
            self._child = subprocess.Popen(
                command, stdin=childs_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except BaseException:
            self._hang_up()
            raise
        finally:
            os.close(childs_end)

    def wait(self, timeout_s: float | None) -> IndexTotals | None:
        """What it found; None when it goes on.

        Raises :class:`FormatError` when the child dies or finds damage in the structure.
        """
        try:
            out, err = self._child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._hang_up()
        if self._child.returncode != 0:
            raise _child_error(self._path, self._child.returncode, err)
        return IndexTotals(**json.loads(out))

    def give_way(self) -> None:
        """Nobody waits for it: others have the processor first."""
        with contextlib.suppress(OSError):  # it has just ended
            niceness = min(_LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + _YIELDING)
            os.setpriority(os.PRIO_PROCESS, self._child.pid, niceness)

    def stop(self) -> None:
        """Whoever waits is told that it died. What it was at, it changes nothing."""
        self._child.kill()

    def _hang_up(self) -> None:
        descriptor, self._our_end = self._our_end, -1
        if descriptor >= 0:
            os.close(descriptor)


def scan_in_child(path: Path, pool_uuid: str, capacity_bytes: int, *, deadline_s: float) -> IndexTotals:
    """What a whole scan finds. Raises :class:`FormatError`, also when it takes longer than ``deadline_s``."""
    scan = IndexScan(path, pool_uuid, capacity_bytes)
    totals = scan.wait(deadline_s)
    if totals is None:
        scan.stop()
        with contextlib.suppress(FormatError):
            scan.wait(None)
        raise FormatError(f"the index {path} could not be read within {deadline_s:.0f} s", next_step=REBUILD)
    return totals


def refuse_other_pool(path: Path, pool_uuid: str, capacity_bytes: int) -> None:
    """Raises :class:`OtherPoolError` for an index of another pool than the drive's, as far as it can be read."""
    scan = IndexScan(path, pool_uuid, capacity_bytes)
    try:
        if scan.wait(_BEGUN_S) is None:  # it has begun, so it is this one's
            scan.stop()
            scan.wait(None)
    except OtherPoolError:
        raise
    except FormatError:
        return


def _child_error(path: Path, returncode: int, stderr: str) -> FormatError:
    last_line = (stderr.strip().splitlines() or ["no message"])[-1]
    if returncode == _EXIT_OTHER_POOL:
        return OtherPoolError(last_line, next_step=OTHER_POOL)
    if returncode == _EXIT_REPORTED:
        return FormatError(last_line, next_step=REBUILD)
    what = f"is damaged: reading it ended with exit code {returncode} ({last_line})"
    if returncode == -signal.SIGBUS:
        what = "is truncated: pages that it names lie behind its end"
    return FormatError(f"the index {path} {what}", next_step=REBUILD)


def _end_with_parent() -> None:
    """A scan that nobody waits for any more would keep LMDB from using again what is freed meanwhile."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(_EXIT_ORPHANED)


def _scan_main(path: str, pool_uuid: str, capacity_bytes: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open_index(Path(path), pool_uuid, int(capacity_bytes), readonly=True) as index:
        index.check_structure()
        print(json.dumps(dataclasses.asdict(index.scan())))


if __name__ == "__main__":
    try:
        _scan_main(*sys.argv[1:])
    except MeshFusionError as reported:
        print(reported.message.replace("\n", " "), file=sys.stderr)
        sys.exit(_EXIT_OTHER_POOL if isinstance(reported, OtherPoolError) else _EXIT_REPORTED)
