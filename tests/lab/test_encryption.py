"""A pool on an encrypted slice, with the kernel's dm-crypt: locally and exported, killed, stopped, and erased."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest
from meshfusion.tools.lab.qemu import EmulatedDrive
from tests.lab.conftest import machine_or_skip

DEADLINE_S = 600.0
RunScript = Callable[[str, str], dict[str, Any]]


def test_a_service_on_an_encrypted_slice(run_script: RunScript) -> None:
    report = run_script("guest_encryption.py", "local")
    assert report["mapping_is_open"]
    assert report["known_is_read"], "through the mapping it is there"
    assert report["raw_is_noise"]
    assert "is in use" in report["raw_in_use"]
    assert report["left_open"], "the kernel keeps it open"
    assert report["found_after_kill"]
    assert report["rekeyed"].startswith("1 header is opened by")
    assert "in use by process" in report["refused_while_served"]
    assert report["closed"]
    assert "does not open the header" in report["old_key"]
    assert "has no encryption" in report["without"]
    assert report["checked"].startswith("checked 1 chunks")
    assert report["closed_after_check"]
    assert "is the header of another slice" in report["header_of_another"]
    assert "is not what the header" in report["other_device"]
    assert report["erased"].startswith("erased the key of")
    assert "is blank: another pool can have it" in report["erased"]
    assert report["headers_left"] == 0
    assert "was erased: nothing" in report["after_erase"]
    assert report["slice_again"]


def test_an_encrypted_slice_is_exported(run_script: RunScript) -> None:
    report = run_script("guest_encryption.py", "exported")
    assert (report["arrived"], report["failures"]) == (True, 0)
    assert report["raw_is_noise"]
    assert report["stays_open_while_exported"]
    assert "could be read there with its key erased" in report["erase_while_exported"]
    assert report["erased"].startswith("erased the key of")
    assert report["closed"]


def test_dm_crypt_over_a_drive(tmp_path: Path) -> None:
    """What is read after a deallocation is noise, which nothing may take for zeros; what was zeroed reads as zeros."""
    tail, drives = OutputTail(1 << 20), (EmulatedDrive(64),)
    command = (sys.executable, str(Path(__file__).parent / "guest_luks.py"))
    guest_run = GuestRun(command, kind="tcg", output_directory=tmp_path, deadline_s=DEADLINE_S)
    result = run_guest(guest_run, machine=machine_or_skip("tcg", drives), sink=tail)
    assert result.exit_code == 0, f"{tail.stdout}{tail.stderr}\n{(tmp_path / CONSOLE_LOG).read_text()}"
    report = json.loads(tail.stdout.splitlines()[-1])
    assert (report["problem"], report["raw_after_format"]) == ("", False)
    assert "does not open the header" in report["wrong_key"]
    assert report["is_proven"]
    assert "which is in use" in report["opened_twice"]
    assert "busy" in report["in_use"]
    assert (report["below"], report["is_same_drive"]) == ("/dev/nvme0n1", True)
    assert report["names"][0] == report["names"][1] != ""
    assert report["alignments"][0] == report["alignments"][1]
    assert report["sizes"] == [64 << 20] * 2
    assert (report["read_back"], report["raw_has_known"]) == (True, False)
    assert (report["discarded"], report["raw_reads_zeros_when_discarded"]) == (True, True)
    assert not report["reads_zeros_when_discarded"]
    assert (report["zeroed"], report["reads_zeros_when_zeroed"]) == (True, True)
    assert not report["raw_reads_zeros_when_zeroed"]
    assert (report["closed_while_open"], report["closed"], report["closed_again"]) == (False, True, True)
    assert report["is_gone"]
    assert "No usable keyslot" in report["after_erase"]
