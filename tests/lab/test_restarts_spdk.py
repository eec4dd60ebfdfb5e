"""As ``test_restarts_nvmet.py``, with SPDK's target killed. Collected only where there is one (conftest.py)."""

from __future__ import annotations

import pytest

from tests.lab.conftest import RunScript
from tests.lab.restart_checks import check_restarts
from tests.lab.test_restarts_nvmet import MEMORY_MIB, SCRIPT


@pytest.mark.nightly  # the engines' imports alone take a guest half a minute
def test_all_comes_back_by_itself_and_nothing_wrong_is_served(run_script: RunScript) -> None:
    check_restarts(run_script(SCRIPT, "spdk", MEMORY_MIB, 1400.0), 1, target="spdk")


@pytest.mark.nightly
def test_it_does_so_twenty_times(run_script: RunScript) -> None:
    check_restarts(run_script(SCRIPT, "spdk-long", MEMORY_MIB, 3600.0), 5, target="spdk")
