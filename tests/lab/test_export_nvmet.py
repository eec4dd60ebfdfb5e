"""Exports and fences at a real kernel's NVMe-oF target, over NVMe/TCP in a guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]


def test_a_real_kernel_is_brought_to_what_is_desired_and_fences_a_writing_host(run_script: RunScript) -> None:
    seen = run_script("guest_export.py", "all")
    assert seen["created"] == [True, [], 0]
    assert seen["changed"] == [True, 2]  # one ANA state for two subsystems
    assert seen["changed back"] == [True, []]
    assert (seen["connected"], seen["stranger"] != "") == ("", True)
    assert seen["first verdict"].startswith('NotYet(reason="the kernel has been at it'), seen
    assert seen["confirmed"]
    assert seen["confirmed_s"] >= 0.9, "the write took a second, and it was waited for"
    assert not seen["readmitted"]
    assert seen["moved"] == [True, [], ["1"], 1]
    assert seen["keyed"] == [True, [], True]
    assert seen["another key"] == [True, 1, True, [0o600, 0o600]]
    assert seen["read by others"] == ["", "hmac(sha256)\n"], "not the key; what is no secret, they do"
    assert seen["gone"] == [True, [[], [], []]]
