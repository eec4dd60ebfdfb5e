"""fio on one file: what the drive gives a program that only reads or writes.

fio is a package of Debian and Ubuntu: ``apt install fio``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from meshfusion.jbof.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class FioJob:
    """``threads`` of them, each with one transfer of ``block_bytes`` under way at a time, O_DIRECT, over ``size_bytes``
    of ``file`` from ``offset_bytes`` on, in order. ``flush_blocks``: of a writer, fdatasync after so many."""

    file: Path
    block_bytes: int
    size_bytes: int
    offset_bytes: int
    threads: int = 1
    flush_blocks: int = 0

    def command(self) -> list[str]:
        part_bytes = self.size_bytes // self.threads // self.block_bytes * self.block_bytes
        writing = [f"--fdatasync={self.flush_blocks}", "--end_fsync=1"] if self.flush_blocks else []
        return [
            "fio",
            "--name=job",
            f"--filename={self.file}",
            f"--rw={'write' if self.flush_blocks else 'read'}",
            "--ioengine=psync",
            "--direct=1",
            "--fallocate=none",
            f"--bs={self.block_bytes}",
            f"--size={part_bytes}",
            f"--offset={self.offset_bytes}",
            f"--offset_increment={part_bytes}",
            f"--numjobs={self.threads}",
            "--thread",
            "--group_reporting",
            "--output-format=json",
            *writing,
        ]


def check_fio() -> str:
    """Its version. Raises :class:`UnsupportedError` where there is none."""
    if shutil.which("fio") is None:
        raise UnsupportedError("fio is not installed, and it is what we compare with", next_step="apt install fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def fio_rate(job: FioJob) -> float:
    """GB/s."""
    done = subprocess.run(job.command(), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if job.flush_blocks else "read"]
    assert found["io_bytes"], "fio moved nothing"
    return float(found["io_bytes"] / (found["runtime"] / 1e3) / 1e9)
