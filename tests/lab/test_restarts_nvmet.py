"""The kernel's target, the service, or both are killed and started again under the load of engines, in a guest.

With SPDK's target in its place: ``test_restarts_spdk.py``. A failure names its seed: ``mfctl lab run -- python
tests/lab/guest_restarts.py nvmet SEED``.
"""

from __future__ import annotations

import pytest

from tests.lab.conftest import RunScript
from tests.lab.restart_checks import check_restarts

SCRIPT = "guest_restarts.py"
MEMORY_MIB = 4096


@pytest.mark.nightly  # the engines' imports alone take a guest half a minute
def test_all_comes_back_by_itself_and_nothing_wrong_is_served(run_script: RunScript) -> None:
    check_restarts(run_script(SCRIPT, "nvmet", MEMORY_MIB, 1400.0), 1, target="nvmet")


@pytest.mark.nightly
def test_it_does_so_twenty_times(run_script: RunScript) -> None:
    check_restarts(run_script(SCRIPT, "nvmet-long", MEMORY_MIB, 3600.0), 5, target="nvmet")
