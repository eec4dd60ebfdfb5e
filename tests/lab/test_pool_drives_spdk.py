"""A pool of two drives over SPDK's target and soft-RoCE. Collected only where there is one (conftest.py)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest
from meshfusion.tools.lab.machine import Machine
from tests.lab.conftest import NVMF_TGT_VARIABLE
from tests.lab.test_pool_drives_nvmet import check


def test_a_pool_of_two_drives_is_reached_over_the_fabric(uml: Machine, tmp_path: Path) -> None:
    tail = OutputTail(1 << 20)
    command = (sys.executable, str(Path(__file__).parent / "guest_pool_drives.py"), "spdk")
    environment = {NVMF_TGT_VARIABLE: os.environ[NVMF_TGT_VARIABLE]}
    run = GuestRun(command, environment=environment, output_directory=tmp_path, memory_mib=2048)
    result = run_guest(run, machine=uml, sink=tail)
    assert result.exit_code == 0, f"{tail.stdout}{tail.stderr}\n{(tmp_path / CONSOLE_LOG).read_text()}"
    check(json.loads(tail.stdout.splitlines()[-1]))
