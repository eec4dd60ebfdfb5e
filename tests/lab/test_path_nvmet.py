"""The direct path against the kernel's NVMe-oF target, over soft-RoCE in a guest: KV memory to medium and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]

SCRIPT = "guest_path.py"


def test_units_go_straight_from_blocks_to_the_medium_and_back(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "round_trip")
    assert report["on_medium"]
    assert report["header"]
    assert report["failures"] == 0
    assert report["arrived"]
    assert report["untouched"]
    assert report["after_flip"] == [[3, True]]
    assert report["is_quiet"]


def test_a_drawn_cable_gives_blocks_back_only_when_nobody_can_write_them(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "cut_while_loading")
    assert report["failed"] == 8
    assert report["mismatches"] == 0
    assert 1.0 <= report["told_s"] < 5.0
    assert report["left_alone"]
    assert report["after"] == 0
    assert report["same"]
    assert report["is_quiet"]
