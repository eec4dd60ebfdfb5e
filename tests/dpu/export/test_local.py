"""The local path's fence is the liveness lock."""

from __future__ import annotations

import os
from pathlib import Path

from meshfusion.dpu.api.liveness import create_liveness, hold_liveness
from meshfusion.dpu.export.fence import Confirmed, NotYet
from meshfusion.dpu.export.local import LocalTarget


def test_a_fence_is_confirmed_when_no_process_is_left(tmp_path: Path) -> None:
    create_liveness(tmp_path / "one.alive")
    held = hold_liveness(tmp_path / "one.alive")
    target = LocalTarget(tmp_path)
    assert isinstance(target.fence("one"), NotYet)
    os.close(held)
    assert target.fence("one") == Confirmed()
    assert target.fence("one") == Confirmed(), "asked again before it is durable"
    assert isinstance(target.fence("unknown"), NotYet)
