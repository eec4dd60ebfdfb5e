"""``--sim-seed N``: replay one world of the simulation (``python -m pytest tests/sim --sim-seed 7``)."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=None, help="run only the simulated world of this seed")
