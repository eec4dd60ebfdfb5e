"""FlexPath over two soft-RoCE paths in a guest, one of which stalls, dies, flaps or loses packets under load.

Rates are compared within one run, so that a slow machine changes nothing. Measured on two busy processors: from a
second after the loss of the faster path on, 0.92 to 1.07 of what the other does alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.conftest import RunScript

SCRIPT = "guest_flaky_paths.py"
TOLD_LATE_S = 1.0  # as much grace as whoever waits gives (PendingTransfer.wait)
MEMORY_LATE_S = 2.0  # and what the end of a queue pair takes
# A connection attempt that began while the path was bad (3 s), the pause after it (1 s), the longest quarantine (2 s),
# the steps of its growing share (1 s), and as much for a slow machine.
BACK_S = 14.0
BOTH_USED = 1.3  # of what the good path does alone; both together do 2.5 times as much where the processor lets them


def nothing_went_wrong(load: dict[str, Any]) -> None:
    assert load["wrong_reads"] == 0
    assert load["foreign"] == 0, "blocks hold what nobody wrote there"
    assert load["lost"] == 0, "what was reported as written is not there"
    assert load["touched"] == 0, "memory that was given back"
    assert load["late_s"] < TOLD_LATE_S
    assert load["memory_late_s"] < MEMORY_LATE_S
    assert load["back_s"] < BACK_S, "a path that is good again is used again"


def one_bad_path(report: dict[str, Any]) -> None:
    nothing_went_wrong(report)
    assert set(report["ends"]) <= {"read done", "write done", "write in doubt"}, "all else survives on the other path"
    assert report["before_of_alone"] >= BOTH_USED
    assert report["during_of_alone"] >= 0.8, "from one second after the loss on"
    assert report["again_of_before"] >= 0.75


def test_a_path_that_stalls_is_left_and_comes_back(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "stall")
    one_bad_path(report)
    assert report["ends"]["write in doubt"] > 0, "some were under way"
    outage = report["outage"]
    nothing_went_wrong(outage)
    assert outage["ends"]["write in doubt"] > 0
    assert set(outage["errors"]) <= {"NoPathError", "RequestLateError", "CommandDeadlineError", "QueueLostError"}


def test_a_path_whose_target_drops_it_is_left_and_comes_back(run_script: RunScript) -> None:
    one_bad_path(run_script(SCRIPT, "kill"))


def test_a_path_that_flaps_holds_up_nothing(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "flap")
    one_bad_path(report)
    assert report["ends"]["write in doubt"] > 0


def test_a_path_that_loses_packets_holds_up_nothing(run_script: RunScript) -> None:
    one_bad_path(run_script(SCRIPT, "lossy"))


@pytest.mark.nightly
def test_anything_on_both_paths_costs_no_byte(run_script: RunScript) -> None:
    nothing_went_wrong(run_script(SCRIPT, "storm"))
