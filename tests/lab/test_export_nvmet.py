"""Exports and fences at a real kernel's NVMe-oF target, over NVMe/TCP in a guest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, ready_machine, run_guest

SCRIPT = Path(__file__).parent / "guest_export.py"

pytestmark = pytest.mark.timeout(4000)  # the first test of all builds the kernel


def test_a_real_kernel_is_brought_to_what_is_desired_and_fences_a_writing_host(tmp_path: Path) -> None:
    tail = OutputTail(1 << 20)
    guest_run = GuestRun((sys.executable, str(SCRIPT)), output_directory=tmp_path, deadline_s=180.0)
    result = run_guest(guest_run, machine=ready_machine("uml"), sink=tail)
    said = f"{tail.stdout}{tail.stderr}\n{(tmp_path / CONSOLE_LOG).read_text(errors='replace')}"
    assert result.exit_code == 0, said
    seen = json.loads(tail.stdout.splitlines()[-1])
    assert seen["created"] == [True, [], 0]
    assert seen["changed"] == [True, 2]  # one ANA state for two subsystems
    assert seen["changed back"] == [True, []]
    assert (seen["connected"], seen["stranger"] != "") == ("", True)
    assert seen["first verdict"].startswith('NotYet(reason="the kernel has been at it'), said
    assert seen["confirmed"]
    assert seen["confirmed_s"] >= 0.9, "the write took a second, and it was waited for"
    assert not seen["readmitted"]
    assert seen["moved"] == [True, [], ["1"], 1]
    assert seen["keyed"] == [True, [], True]
    assert seen["gone"] == [True, [[], [], []]]
