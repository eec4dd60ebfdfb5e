"""A pool of two drives over the kernel's target and soft-RoCE: both are exported, proven, written and read.

With SPDK's target in its place: ``test_pool_drives_spdk.py``.
"""

from __future__ import annotations

from typing import Any

from tests.lab.conftest import RunScript

DEADLINE_S = 400.0


def test_a_pool_of_two_drives_is_reached_over_the_fabric(run_script: RunScript) -> None:
    check(run_script("guest_pool_drives.py", "nvmet"))


def test_drives_come_and_go_while_a_host_stores_and_loads(run_script: RunScript) -> None:
    check_hot(run_script("guest_hot_drives.py", "nvmet", deadline_s=DEADLINE_S))


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


def check_hot(report: dict[str, Any]) -> None:
    assert report["with_three"] == [1, 2, 3], "it was found and proven over the path that was open"
    assert report["without"] == [1, 3]
    assert (report["failed"], report["wrong"]) == (0, 0), "nobody was in its way"
    assert set(report["given_up"]) <= {1}, "what was being written to a drive when it began to leave"
    assert report["loaded"] > report["stored_before_removal"]
    assert report["on_removed"] > 0
    assert report["missed_at_last"] == report["on_removed"], "what lay on the drive that has left, and nothing else"
    assert (report["late_write"], report["is_whole"]) == ("refused", True)
    assert report["is_quiet"] == [True, True]
