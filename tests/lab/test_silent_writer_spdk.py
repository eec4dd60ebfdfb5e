"""As ``test_silent_writer_nvmet.py``, with SPDK's target. Collected only where there is one (conftest.py)."""

from __future__ import annotations

import pytest

from tests.lab.conftest import RunScript
from tests.lab.restart_checks import check_silent_writers, check_unfenced
from tests.lab.test_silent_writer_nvmet import ALL, FEW, MEMORY_MIB, SCRIPT


def test_a_silent_writer_that_wakes_up_can_damage_nothing(run_script: RunScript) -> None:
    check_silent_writers(run_script(SCRIPT, "spdk", MEMORY_MIB, 400.0), FEW)


def test_without_fences_it_would_be_seen(run_script: RunScript) -> None:
    check_unfenced(run_script(SCRIPT, "spdk-unfenced", MEMORY_MIB, 300.0))


@pytest.mark.nightly
def test_it_can_damage_nothing_whatever_is_restarted_meanwhile(run_script: RunScript) -> None:
    check_silent_writers(run_script(SCRIPT, "spdk-all", MEMORY_MIB, 900.0), ALL)


@pytest.mark.nightly
def test_it_can_damage_nothing_after_a_minute(run_script: RunScript) -> None:
    check_silent_writers(run_script(SCRIPT, "spdk-minute", MEMORY_MIB, 500.0), 1)
