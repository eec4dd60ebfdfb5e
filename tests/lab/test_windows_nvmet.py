"""Keys that die with their command, against the kernel's NVMe-oF target, over soft-RoCE in a guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]

SCRIPT = "guest_windows.py"


def test_data_goes_through_windows_that_the_target_closes(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "transfers")
    assert report["wrong"] == []
    assert report["pieces"] == 5 * 4096
    assert report["max_descriptors"] == 1
    assert report["keys"] == {"by the target": report["binds"], "not by the target": 2}  # two Connects have no window
    assert report["binds"] > 800


def test_a_key_opens_nothing_when_its_command_has_ended(run_script: RunScript) -> None:
    """The region's key is the control: it opens the memory for as long as that is registered."""
    report = run_script(SCRIPT, "late_use")
    common = {"by_right": True, "after": True, "is_written_when_closed": False}
    assert report["command"] == {**common, "said": False, "is_written": False}
    assert report["region"] == {**common, "said": True, "is_written": True}
