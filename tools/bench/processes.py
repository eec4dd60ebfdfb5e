"""Memory and processor time of processes, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """``rss``: resident. ``pss``: shared pages divided among those who map them. ``uss``: private pages only.

    ``anonymous``: resident pages that no file stands behind; the rest are libraries and mapped files.
    """

    rss_bytes: int
    pss_bytes: int
    uss_bytes: int
    anonymous_bytes: int

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.rss_bytes + other.rss_bytes,
            self.pss_bytes + other.pss_bytes,
            self.uss_bytes + other.uss_bytes,
            self.anonymous_bytes + other.anonymous_bytes,
        )


def memory_of(pid: int | str = "self") -> Memory:
    """From ``/proc/PID/smaps_rollup``. Raises OSError when the process is gone."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name.rstrip(":")] = int(value) * 1024
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return Memory(fields["Rss"], fields["Pss"], private, fields["Anonymous"])


def cpu_s(pid: int) -> float:
    """Processor time of all its threads since it began, in steps of a kernel's tick (10 ms). Raises OSError when the
    process is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wakeups(pid: int) -> int:
    """How often its threads that live have waited for something, since they began."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            count += int(fields["voluntary_ctxt_switches"])
    return count


def session_processes(session_id: int) -> dict[int, str]:
    """The processes of a session: process id to command line (engines name their processes there)."""
    found: dict[int, str] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            stat = (directory / "stat").read_text()
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile
        if int(stat.rpartition(")")[2].split()[3]) == session_id:
            found[int(directory.name)] = command
    return found
