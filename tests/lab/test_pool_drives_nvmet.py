"""A pool of two drives over the kernel's target and soft-RoCE: both are exported, proven, written and read.

With SPDK's target in its place: ``test_pool_drives_spdk.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]


def test_a_pool_of_two_drives_is_reached_over_the_fabric(run_script: RunScript) -> None:
    check(run_script("guest_pool_drives.py", "nvmet"))


def check(report: dict[str, Any]) -> None:
    assert report["namespaces"] == [1, 2]
    (first, second) = report["drives"]
    assert (first[0], second[0], first[1] + second[1]) == (1, 2, 6)
    assert report["on_medium"]
    assert report["failures"] == 0
    assert report["arrived"]
    assert report["is_quiet"]
    assert report["without"] == ["drive 1 of the pool is not reached here"], "it was not proven, and is not read"
    assert report["without_count"] == 2 * second[1]
