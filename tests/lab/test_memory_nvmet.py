"""Registered memory against the kernel's NVMe-oF target, over soft-RoCE in a guest: what keys open, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]

SCRIPT = "guest_memory.py"


def test_a_key_opens_nothing_once_closed_and_nothing_to_another_association(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "keys")
    assert report["reached"] == {"live": True, "closed": False, "foreign": False}
    assert report["by_right"]
    assert not report["regions_left"]


def test_a_device_without_dma_bufs_says_so(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "dma_buf")
    assert "cannot register dma-bufs" in report["refusal"]
