"""The local path: engine and service on one machine, the engine opens the pool's data itself. Nothing is exported.

A holder is fenced when no process of it is left, which its liveness lock tells (``dpu/api/liveness``): a process that
lives may have a write in flight, and one that is gone has none, since its last reference to the open file went with it.
"""

from __future__ import annotations

from pathlib import Path

from meshfusion.dpu.api.liveness import take_liveness_away
from meshfusion.dpu.export.fence import Confirmed, Fence, NotYet
from meshfusion.dpu.pool_dir import LIVENESS_SUFFIX


class LocalTarget:
    """``holders``: the folder with a liveness file for each holder, named ``<incarnation>.alive``."""

    def __init__(self, holders: Path) -> None:
        self._holders = holders

    def fence(self, incarnation: str) -> Fence:
        """Ask again until it is confirmed. The caller makes it durable, then forgets the liveness file."""
        if take_liveness_away(self._holders / f"{incarnation}{LIVENESS_SUFFIX}"):
            return Confirmed()
        return NotYet(f"a process of {incarnation} lives, or its liveness file is out of reach")
