"""A writer that falls silent with writes under way, and wakes up when its space is another one's: the kernel's target.

With SPDK's target in its place: ``test_silent_writer_spdk.py``.
"""

from __future__ import annotations

import pytest

from tests.lab.conftest import RunScript
from tests.lab.restart_checks import check_silent_writers, check_unfenced

SCRIPT = "guest_silent_writer.py"
MEMORY_MIB = 2048
FEW, ALL = 3, 7  # ways to fall silent and to be woken up


def test_a_silent_writer_that_wakes_up_can_damage_nothing(run_script: RunScript) -> None:
    check_silent_writers(run_script(SCRIPT, "nvmet", MEMORY_MIB, 400.0), FEW)


def test_without_fences_it_would_be_seen(run_script: RunScript) -> None:
    check_unfenced(run_script(SCRIPT, "nvmet-unfenced", MEMORY_MIB, 300.0))


@pytest.mark.nightly
def test_it_can_damage_nothing_whatever_is_restarted_meanwhile(run_script: RunScript) -> None:
    check_silent_writers(run_script(SCRIPT, "nvmet-all", MEMORY_MIB, 900.0), ALL)


@pytest.mark.nightly
def test_it_can_damage_nothing_after_a_minute(run_script: RunScript) -> None:
    check_silent_writers(run_script(SCRIPT, "nvmet-minute", MEMORY_MIB, 500.0), 1)
