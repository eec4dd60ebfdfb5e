"""FlexPath over paths in memory, with registered memory of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from meshfusion.host.path.flexpath.multipath import Multipath
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer
from tests.host.path.flexpath.fake_path import NSID, Fabric, FakePath
from tests.host.support.waiting import until

BLOCK = 4096
SETTINGS = SpreadSettings(quarantine_s=0.1, reentry_step_s=0.02, access_pause_s=0.05, probe_s=1e9)


class Rig:
    def __init__(self, count: int = 2, fabric: Fabric | None = None, **options: Any) -> None:
        self.fabric = fabric or Fabric(count, max_descriptors=4)
        settings, key = options.pop("settings", SETTINGS), options.pop("key", None)
        self.paths = Multipath(self.fabric.specs(), settings, retry_s=0.02, key=key)
        self.array = np.zeros(8 * BLOCK, np.uint8)
        self.region: RegisteredRegion = self.register(self.array)

    def register(self, array: Any) -> RegisteredRegion:
        return self.paths.register_address(array.ctypes.data, array.nbytes, writable=True, owner=array)

    def read(self, block: int = 0, timeout_s: float = 5.0) -> PendingTransfer:
        return self.paths.begin_read(NSID, block, [self.region.part(block * BLOCK, BLOCK)], timeout_s=timeout_s)

    def write(self, block: int = 0, timeout_s: float = 5.0) -> PendingTransfer:
        return self.paths.begin_write(NSID, block, [self.region.part(block * BLOCK, BLOCK)], timeout_s=timeout_s)

    def hold(self, is_held: bool = True) -> None:
        for paths in self.fabric.opened:
            paths[-1].holds = is_held

    def holder(self) -> FakePath:
        """That which has something under way."""
        (path,) = (paths[-1] for paths in self.fabric.opened if paths[-1].held)
        return path

    def used(self, times: int = 40) -> set[int]:
        """Paths that take single reads."""
        before = len(self.fabric.log)
        counts = [len(paths[-1].log) for paths in self.fabric.opened if paths]
        for _ in range(times):
            self.read().wait()
        assert len(self.fabric.log) == before + times
        after = [len(paths[-1].log) for paths in self.fabric.opened if paths]
        return {n for n, (a, b) in enumerate(zip(after, counts, strict=True)) if a > b}


@contextlib.contextmanager
def rig(count: int = 2, **options: Any) -> Iterator[Rig]:
    made = Rig(count, **options)
    try:
        yield made
    finally:
        made.paths.close(timeout_s=1.0)


def soon(condition: Callable[[], object], what: str) -> None:
    assert until(lambda: condition() or None, what=what)
