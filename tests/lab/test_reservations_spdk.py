"""NVMe reservations of a real SPDK target in a guest: our initiator, Linux' initiator, and one owner."""

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

CONFLICT = "Reservation Conflict: another host holds a reservation (sct 0h, sc 83h)"
FIRST_HOST = "000000000000000a0000000000000001"


def run(case: str, machine: Machine, out: Path) -> dict[str, Any]:
    tail = OutputTail(1 << 20)
    command = (sys.executable, str(Path(__file__).parent / "guest_reservations.py"), case)
    environment = {NVMF_TGT_VARIABLE: os.environ[NVMF_TGT_VARIABLE]}
    result = run_guest(GuestRun(command, environment=environment, output_directory=out), machine=machine, sink=tail)
    assert result.exit_code == 0, f"{tail.stdout}{tail.stderr}\n{(out / CONSOLE_LOG).read_text()}"
    report: dict[str, Any] = json.loads(tail.stdout.splitlines()[-1])
    return report


def test_over_our_initiator(uml: Machine, tmp_path: Path) -> None:
    report = run("fabrics", uml, tmp_path)
    assert report["report"] == [True, "WRITE_EXCLUSIVE", [FIRST_HOST]]
    assert report["refused"].startswith(f"DriveOwnedError: the drive is owned by another service: host {FIRST_HOST}")
    assert report["beside"].endswith(CONFLICT)
    assert report["taken_over"] == [True, True, 2]
    assert report["loser"].endswith(CONFLICT)
    assert report["loser_holds"] is False
    assert report["winner"] == "done"
    assert report["again"] == [False, False, 3, "done"]  # after an orderly end


def test_linux_initiator_against_ours(uml: Machine, tmp_path: Path) -> None:
    report = run("kernel", uml, tmp_path)
    assert report["reports_agree"]
    assert report["refused"].startswith(f"DriveOwnedError: the drive is owned by another service: host {FIRST_HOST}")
    assert report["beside"].endswith(CONFLICT)
    assert report["by_owner"] == "done"
    assert report["taken_over"] == [True, True, 2]
    assert report["loser"] == "EBADE"
    assert report["loser_record"].startswith("ReservationConflictError")
    assert report["winner"] == "done"
    assert report["refused_back"].startswith("DriveOwnedError")
    assert report["back"] == [True, True, 3, "done"]
    assert report["loser_of_back"].endswith(CONFLICT)
