"""A pool of two drives over SPDK's target and soft-RoCE. Collected only where there is one (conftest.py)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest
from meshfusion.tools.lab.machine import Machine
from tests.lab.conftest import NVMF_TGT_VARIABLE
from tests.lab.test_pool_drives_nvmet import check, check_hot


def test_a_pool_of_two_drives_is_reached_over_the_fabric(uml: Machine, tmp_path: Path) -> None:
    check(run_with_spdk("guest_pool_drives.py", uml, tmp_path))


def test_drives_come_and_go_while_a_host_stores_and_loads(uml: Machine, tmp_path: Path) -> None:
    check_hot(run_with_spdk("guest_hot_drives.py", uml, tmp_path))


def run_with_spdk(script: str, uml: Machine, folder: Path) -> dict[str, Any]:
    tail = OutputTail(1 << 20)
    command = (sys.executable, str(Path(__file__).parent / script), "spdk")
    environment = {NVMF_TGT_VARIABLE: os.environ[NVMF_TGT_VARIABLE]}
    run = GuestRun(command, environment=environment, output_directory=folder, memory_mib=2048)
    result = run_guest(run, machine=uml, sink=tail)
    assert result.exit_code == 0, f"{tail.stdout}{tail.stderr}\n{(folder / CONSOLE_LOG).read_text()}"
    report: dict[str, Any] = json.loads(tail.stdout.splitlines()[-1])
    return report
