"""Stand-ins for what the lab starts on the host: a "kernel" that is a shell script, a dpkg that has every package."""

from __future__ import annotations

from pathlib import Path

from meshfusion.tools.bench.processes import session_processes

READ_ARGUMENTS = """#!/bin/sh
for word; do
    case $word in
        con1=fd:*) line=${word#con1=fd:} ;;
        lab=*) lab=${word#lab=} ;;
    esac
done
. "$lab/settings"
"""

SERVE = """
PYTHONPATH=$lab/python "$LAB_PYTHON" -S -s -c 'import sys
from meshfusion.tools.lab.guest_agent.agent import Agent
Agent(int(sys.argv[1])).serve()' "$line"
"""

LEAVES_PROCESSES = "sleep 1000 &\n"


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_kernel(directory: Path, *parts: str) -> Path:
    """Takes the arguments of a User-Mode Linux kernel, then does ``parts``; without any, it serves as a guest does."""
    return executable(directory / "linux", READ_ARGUMENTS + "".join(parts or (LEAVES_PROCESSES, SERVE)))


def fake_dpkg_query(directory: Path, *, installed: bool) -> Path:
    """Put ``directory`` on PATH: every package that is asked for is installed, or none."""
    says = 'for name; do echo "$name installed"; done' if installed else "exit 1"
    return executable(directory / "dpkg-query", f"#!/bin/sh\nshift 3\n{says}\n")


def processes_of(pid: int) -> dict[int, str]:
    """Those of the session that ``pid`` leads, but for zombies, which have no command line any more."""
    return {p: command for p, command in session_processes(pid).items() if command}
