"""Were files changed after this process began? Then nobody can say which bytes the engine has read.

The engine loads weights and adapters at some moment we do not see, and we read the same files later. Files that are
older than the process are the same at both moments; of younger ones nothing is known, and unknown means no (rule 6).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_STARTTIME_FIELD = 22  # proc(5), /proc/[pid]/stat, counted from 1


def process_started_ns() -> int:
    """When this process began, in nanoseconds of the wall clock (as file times are), to about 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_STARTTIME_FIELD - 3]) / os.sysconf("SC_CLK_TCK")  # since boot
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + round(started_s * 1e9)


def first_changed_since(paths: Iterable[Path], started_ns: int) -> Path | None:
    """The first of ``paths`` whose inode, or whose symbolic link, changed at or after ``started_ns``.

    The change time is looked at, not the modification time: it cannot be set back, and a rename changes it too.
    """
    for path in paths:
        if max(path.stat().st_ctime_ns, path.lstat().st_ctime_ns) >= started_ns:
            return path
    return None
