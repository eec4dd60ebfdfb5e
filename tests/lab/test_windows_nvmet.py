"""Keys that die with their command, against the kernel's NVMe-oF target, over soft-RoCE in a guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]

SCRIPT = "guest_windows.py"


WITHOUT_WINDOW = 2  # commands that have none: a Connect on each I/O queue


def check_transfers(report: dict[str, Any]) -> None:
    assert report["wrong"] == []
    assert report["pieces"] == 5 * 4096
    assert report["max_descriptors"] == 1
    assert report["state"] == "live"
    assert report["binds"] > 800


def test_data_goes_through_windows_that_the_target_closes(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "transfers")
    check_transfers(report)
    assert report["keys"] == {"by the target": report["binds"], "not by the target": WITHOUT_WINDOW}


def test_keys_that_the_target_leaves_are_closed_here(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "keys_left")
    check_transfers(report)
    assert report["keys"] == {"not by the target": report["binds"] + WITHOUT_WINDOW}
    assert (report["late"]["by_right"], report["late"]["is_written"]) == (True, False)


def test_a_key_opens_nothing_when_its_command_has_ended(run_script: RunScript) -> None:
    """The region's key is the control: it opens the memory for as long as that is registered."""
    report = run_script(SCRIPT, "late_use")
    common = {"by_right": True, "after": True, "is_written_when_closed": False}
    assert report["command"] == {**common, "said": False, "is_written": False}
    assert report["region"] == {**common, "said": True, "is_written": True}
