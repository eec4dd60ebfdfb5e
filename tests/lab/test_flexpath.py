"""FlexPath over two soft-RoCE paths of different speed, in a guest: their sum, and the loss of one under load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]


def test_two_paths_give_the_sum_and_the_loss_of_one_costs_no_byte(run_script: RunScript) -> None:
    report = run_script("guest_flexpath.py", "spread")
    assert report["wrong"] == 0
    assert report["failed"] == [], "reads of the lost path are replayed on the other"
    # On a machine with nothing else to do these are 0.99; on any, more than the faster path alone (0.67) says that both
    # are used, each for what it can.
    assert report["of_the_sum"] >= 0.75
    assert report["after_cut_of_survivor"] >= 0.75, "from one second after the loss on"
    assert report["oldest_read_s"] < 5.0, "no read is older than its deadline"
