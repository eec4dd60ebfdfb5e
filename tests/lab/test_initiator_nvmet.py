"""Our initiator against the kernel's NVMe-oF target, over soft-RoCE in a guest: data, faults, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunCase = Callable[[str], dict[str, Any]]
RunScript = Callable[[str, str], dict[str, Any]]

SCRIPT = "guest_initiator.py"


@pytest.fixture
def run_case(run_script: RunScript) -> RunCase:
    return lambda case: run_script(SCRIPT, case)


def test_data_of_any_size_and_alignment(run_case: RunCase) -> None:
    report = run_case("transfers")
    assert report["model"] == "Linux"
    assert report["wrong"] == []
    assert report["namespaces"] == [1, 2]
    assert report["capacity_mib"] == 64
    assert report["ana"] == "1"
    assert report["on_medium"] == [7, 7, 7, 9]
    assert report["after_deallocation"] == [0, 7, 0, 9]


def test_an_idle_connection_stays(run_case: RunCase) -> None:
    report = run_case("idle")
    assert report["state"] == "live"
    assert "ConnectionLost" not in report["events"]


def test_a_target_that_goes_away_and_comes_back(run_case: RunCase) -> None:
    report = run_case("target_removed")
    assert report["removal_failures"] == []
    assert sum(report["ends"].values()) == 32
    assert set(report["ends"]) <= {"done", "FateUnknownError", "QueueLostError", "NvmeCommandError", "MediaError"}
    assert report["uses"] == 0
    assert report["refused"] == "QueueLostError"


def test_memory_is_left_alone_after_a_hard_kill(run_case: RunCase) -> None:
    report = run_case("hard_kill")
    assert all(round_["untouched"] for round_ in report["rounds"])
    assert sum(round_["ends"].get("FateUnknownError", 0) for round_ in report["rounds"]) > 0, "none was in doubt"
    assert set(report["values"]) <= {0, 1}, "a write took bytes that were put there after its memory was free"


def test_a_cut_path(run_case: RunCase) -> None:
    report = run_case("path_cut")
    assert report["end"] == "FateUnknownError"
    assert 1.0 <= report["told_s"] < 1.3
    assert report["in_use"] in (0, 1)
    assert report["free"]
    assert {"ConnectionLost", "RetryScheduled"} <= set(report["events"])


def test_changes_at_the_target_are_noticed(run_case: RunCase) -> None:
    report = run_case("changes")
    assert max(report["seconds"]) < 5.0
    assert report["refused"] == "PathUnusableError"
    assert report["changes"] >= 4


def test_what_a_user_may_get_wrong(run_case: RunCase) -> None:
    said = run_case("refusals")["said"]
    kinds = {what: kind for what, (kind, _) in said.items()}
    assert kinds["host"] == kinds["subsystem"] == "NvmeCommandError"
    assert "Connect Invalid Host" in said["host"][1]
    assert "Connect Invalid Parameters" in said["subsystem"][1]
    assert kinds["service"] == "NvmeConnectRejectedError"
    assert kinds["address"] in ("MediaError", "CommandDeadlineError")
    assert kinds["network"] == "MediaError"


def test_another_initiator_reads_what_ours_wrote_and_the_other_way_round(run_case: RunCase) -> None:
    report = run_case("peer")
    assert report["read_by_peer"]
    assert report["read_by_us"]


def test_what_a_command_costs(run_case: RunCase) -> None:
    """Numbers to look at; emulation says nothing of real devices, but something of the cost of a command here."""
    rows = run_case("cost")["rows"]
    assert all(row["per_s"] > 0 for row in rows)
