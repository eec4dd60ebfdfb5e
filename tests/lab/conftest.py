"""What the tests in guests share. The first of them builds the guest's kernel, if that is not there yet."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import pytest

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.guest import CONSOLE_LOG, DEFAULT_MEMORY_MIB, GuestRun, ready_machine, run_guest
from meshfusion.tools.lab.machine import Kind, Machine
from meshfusion.tools.lab.qemu import EmulatedDrive

BUILD_TIMEOUT_S = 4000
CASE_DEADLINE_S = 180.0
NVMF_TGT_VARIABLE = "MESHFUSION_TEST_NVMF_TGT"
"""Names SPDK's target, built with RDMA, for the tests that need it: it comes from no registry."""

_NEED_SPDK = ("pool_drives", "reservations", "restarts", "silent_writer")
collect_ignore = [] if os.environ.get(NVMF_TGT_VARIABLE) else [f"test_{name}_spdk.py" for name in _NEED_SPDK]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nobody is to think that they ran."""
    for name in collect_ignore:
        terminalreporter.line(f"NOT RUN tests/lab/{name}: {NVMF_TGT_VARIABLE} names no nvmf_tgt of SPDK")


class RunScript(Protocol):
    def __call__(
        self, script: str, case: str, memory_mib: int = DEFAULT_MEMORY_MIB, deadline_s: float = CASE_DEADLINE_S
    ) -> dict[str, Any]: ...


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))


@pytest.fixture(scope="session")
def uml() -> Machine:
    return machine_or_skip("uml")


def machine_or_skip(kind: Kind, drives: tuple[EmulatedDrive, ...] = ()) -> Machine:
    """What is missing is installed and built. Where that cannot be, tests are skipped with the reason, except in CI."""
    if kind == "uml" and platform.machine() != "x86_64":
        pytest.skip("needs hardware: User-Mode Linux runs on x86-64")
    began = time.monotonic()
    try:
        machine = ready_machine(kind, drives)
    except LabError as error:
        pytest.skip(f"no guest on this machine: {error}")
    print(f"the {kind} guest was made ready in {time.monotonic() - began:.0f} s", file=sys.__stderr__, flush=True)
    return machine


@pytest.fixture
def run_script(uml: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunScript:
    """Runs a case of a script of this folder in a guest of its own; its report, which names nothing that is left."""

    def run(
        script: str, case: str, memory_mib: int = DEFAULT_MEMORY_MIB, deadline_s: float = CASE_DEADLINE_S
    ) -> dict[str, Any]:
        tail = OutputTail(1 << 20)
        command = (sys.executable, str(Path(__file__).parent / script), case)
        guest_run = GuestRun(command, output_directory=tmp_path, deadline_s=deadline_s, memory_mib=memory_mib)
        result = run_guest(guest_run, machine=uml, sink=tail)
        said = f"{tail.stdout}{tail.stderr}\n{(tmp_path / CONSOLE_LOG).read_text(errors='replace')}"
        assert result.exit_code == 0, said
        assert "BUG:" not in said
        assert "WARNING:" not in said
        with capsys.disabled():
            print(f"\n{case}: boot {result.boot_s:.1f} s, run {result.run_s:.1f} s: {tail.stdout}", flush=True)
        report: dict[str, Any] = json.loads(tail.stdout.splitlines()[-1])
        assert report["left"] == []
        return report

    return run
