"""What the tests of the pool client share."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.host import pool_standing
from tests.host.support.chunk_records import make_records
from tests.host.support.controlled_service import ControlledService
from tests.host.support.pool_client_rig import IDENTITY


@pytest.fixture
def quick_reattach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_standing, "REATTACH_FIRST_S", 0.01)
    monkeypatch.setattr(pool_standing, "REATTACH_MAX_S", 0.05)


@pytest.fixture
def service(tmp_path: Path) -> ControlledService:
    made = ControlledService(tmp_path)
    made.chunks = {c.key: c for c in make_records(3, block_tokens=16, blocks_per_chunk=4, identity=IDENTITY)}
    return made
